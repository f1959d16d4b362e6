"""A client of the service as the SDK is one: it repeats what was not answered, and holds on to its numbers."""

import json
import time
import urllib.error
import urllib.request

from areal.serve.wire import LossRequest
from tests.serve.messages import decode_loss_output, encode_loss_request

PATIENCE_S = 120.0


class HttpClient:
    """One user of a service at `address`."""

    def __init__(self, address, key):
        self.address, self.key = address, key

    def post(self, path, body, *, method="POST"):
        """(status, bytes) of the answer, after any number of lost connections."""
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        headers = {"X-API-Key": self.key, "Content-Type": "application/json", "X-Idempotency-Key": "one"}
        deadline = time.monotonic() + PATIENCE_S
        while True:
            request = urllib.request.Request(f"{self.address}/api/v1/{path}", data, headers, method=method)
            try:
                with urllib.request.urlopen(request, timeout=60) as answer:
                    return answer.status, answer.read()
            except urllib.error.HTTPError as error:
                if error.code not in (408, 503):
                    return error.code, error.read()
            except OSError:
                pass
            assert time.monotonic() < deadline, f"no answer to {path}"
            time.sleep(0.05)

    def ask(self, path, body, **options):
        status, data = self.post(path, body, **options)
        assert status == 200, (path, status, data)
        return json.loads(data)

    def result(self, request_id):
        status, data = self.post("retrieve_future", {"request_id": request_id})
        assert status == 200, (status, data)
        return data


class HttpModel:
    """An adapter of a client."""

    def __init__(self, client, number=0, **lora):
        self.client = client
        session = client.ask("create_session", {"tags": [], "sdk_version": "0.38.0"})["session_id"]
        body = {"session_id": session, "model_seq_id": number, "base_model": "tiny", "lora_config": {"rank": 4} | lora}
        request = client.ask("create_model", body)["request_id"]
        self.session, self.id, self.seq = session, json.loads(client.result(request))["model_id"], 0

    def _address(self):
        self.seq += 1
        return {"model_id": self.id, "seq_id": self.seq}

    def send(self, path, **fields):
        return self.client.ask(path, self._address() | fields)["request_id"]

    def send_loss(self, data, loss_fn="cross_entropy", *, forward_only=False, config=None):
        request = LossRequest(data=data, loss_fn=loss_fn, forward_only=forward_only, config=config or {})
        body = encode_loss_request(request, **self._address())
        return self.client.ask("forward_backward", body)["request_id"]

    def send_step(self, lr=1e-2):
        return self.send("optim_step", adam_params={"learning_rate": lr})

    def loss_of(self, request_id):
        return decode_loss_output(self.client.result(request_id))
