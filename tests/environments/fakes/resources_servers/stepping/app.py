"""Two steps; a call is answered by the server itself."""

from nemo_gym.base_resources_server import SimpleResourcesServer


class Stepping(SimpleResourcesServer):
    def routes(self):
        return {"/reset": self.reset, "/step": self.step}

    def reset(self, session, body):
        session["turns"] = 0
        return {"observation": "begin", "info": {}}

    def step(self, session, body):
        session["turns"] += 1
        (item,) = body["response"]["output"]
        if item["type"] == "function_call":
            info = {"tool_outputs": [{"call_id": item["call_id"], "output": "told"}]}
            return {"observation": None, "reward": 0.5, "terminated": False, "info": info}
        return {"observation": "more", "reward": 1.0, "terminated": session["turns"] == 2, "truncated": False}
