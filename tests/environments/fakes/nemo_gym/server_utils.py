"""The client of other servers."""


class ServerClient:
    @classmethod
    def model_construct(cls):
        return cls()
