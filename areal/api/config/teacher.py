"""Options of the teacher, which the policy imitates on its own answers: a frozen model in the trainer, inference
servers, or an average of the policy."""

from dataclasses import dataclass, field

from areal.api.config.rollout import SOURCE_KEY, address_problems
from areal.api.config.schema import Problem, Problems, above, choice, given, number, option, section
from areal.api.config.train import TrainEngineConfig


@dataclass(frozen=True, kw_only=True)
class TeacherServersConfig:
    """Running inference servers with one teacher model. AREAL_TEACHER_TOKEN has their token or API key, if any."""

    server_addrs: list[str] = field(default_factory=list[str])
    """Their addresses (host:port or http://host:port); requests alternate between them."""
    backend: str = "native"
    """Kind of these servers, as in allocation_mode."""
    sources: list[str] = field(default_factory=list[str])
    """Values of teacher.source_key whose answers they teach; [] = those that no other entry names."""
    tokenizer_path: str = ""
    """Tokenizer of a model with other tokens: answers are compared by spans of text; empty = the policy's tokens."""

    def problems(self) -> Problems:
        if not self.server_addrs:
            yield Problem("server_addrs", "is required: list the servers of this teacher", "config.missing_requirement")
        for text, problem in address_problems(self.server_addrs):
            yield "server_addrs", f"{text!r} {problem}"


@dataclass(frozen=True, kw_only=True)
class TeacherConfig(TrainEngineConfig):
    """A language model that the policy imitates on its own answers: a frozen model in the trainer, unless `servers` or
    `average_decay` is set."""

    servers: list[TeacherServersConfig] = section(list[TeacherServersConfig])
    """Inference servers that have the teachers, instead of a model in the trainer; they score each finished episode."""
    source_key: str = option(SOURCE_KEY, relevant=given("servers"))
    """Column of a row that chooses the entry of `servers`."""
    top_k: int = number(0, low=0, high=1024, relevant=given("servers"))
    """KL of the loss over this number of the teacher's likeliest tokens; 0 = estimated from the sampled token."""
    server_timeout_s: float = number(600.0, above=0, relevant=given("servers"))
    """Maximum seconds for the scores of an answer, with repeated requests; the episode then fails."""
    average_decay: float | None = number(None, above=0, below=1)
    """Self-distillation: after each step teacher = decay teacher + (1 - decay) policy, in float32; null = frozen."""
    advantage_coef: float = number(1.0, low=0)
    """Coefficient of log(pi_teacher / pi) in the advantage of each token, pi before the update; 0 = none."""
    rl_weight: float = number(1.0, low=0)
    """Factor of the advantages from rewards; 0 = learn from the teacher only."""
    loss_coef: float = number(0.0, low=0)
    """Coefficient of KL(policy || teacher) as a term of the policy loss; 0 = none."""
    loss_estimator: str = choice(
        "k2", "k1", "k2", "k3", "abs", "k1+", "k2+", "k3+", "abs+", relevant=above("loss_coef", 0)
    )
    """KL estimator of the loss term, as in actor.kl_loss_estimator."""

    def problems(self) -> Problems:
        yield from super().problems()
        if self.optimizer is not None:
            yield "optimizer", "is set, but a teacher is never trained: set it to null"
        if self.advantage_coef == 0 and self.loss_coef == 0:
            yield "advantage_coef", "and loss_coef are both 0, so the teacher is not used: raise one"
        if self.average_decay is not None and self.dtype != "float32":
            yield "dtype", f"{self.compute_dtype} rounds the steps of average_decay away: set it to float32"
        if self.servers:
            yield from self._server_problems()

    def _server_problems(self) -> Problems:
        named = [source for servers in self.servers for source in servers.sources or [""]]
        for source in sorted({source for source in named if named.count(source) > 1}):
            what = f"have {source!r} twice" if source else "have two entries for all other rows"
            yield "servers", f"{what}: name each source in one entry"
        unused = TrainEngineConfig(temperature=self.temperature)
        for name, default in vars(unused).items():
            if vars(self)[name] != default:
                yield name, "is of a model in the trainer, and the teacher is on servers: remove one of them"
        if self.average_decay is not None:
            yield "average_decay", "makes a teacher in the trainer, and servers has another one: remove one of them"
        if self.top_k and self.loss_coef == 0:
            yield "top_k", "is of the loss, and loss_coef is 0: raise it, or remove top_k"
        if self.top_k and any(servers.tokenizer_path for servers in self.servers):
            yield "top_k", "compares single tokens, which a tokenizer_path does not have: remove one of them"
