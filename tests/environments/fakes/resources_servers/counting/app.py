"""A counter for each session, which a tool increments."""

from nemo_gym.base_resources_server import SimpleResourcesServer


class Counting(SimpleResourcesServer):
    def routes(self):
        return {"/seed_session": self.seed, "/add": self.add, "/fail": self.fail, "/verify": self.verify}

    def seed(self, session, body):
        session["count"] = body["initial"]
        return {}

    def add(self, session, body):
        session["count"] += body["number"]
        return {"count": session["count"]}

    def fail(self, session, body):
        raise KeyError("a fault")

    def verify(self, session, body):
        output = body["response"]["output"]
        if any(item.get("text") == "broken" for each in output for item in each.get("content", ())):
            return None
        bonus = self.config.options.get("bonus", 0.0)
        reward = float(session["count"] == body["expected"]) + bonus
        parts = {"items": len(output), "cut": float("incomplete_details" in body["response"])}
        return {"reward": reward, "mask_sample": body.get("mask", False), "reward_components": parts}
