#!/usr/bin/env bash
# The Tinker SDK sends the first chunk of a forward_backward call after all its other chunks.
#
# Version: tinker 0.38.0, Python 3.11, Linux.
#
# Assumption: a client that numbers its requests (`seq_id`) sends them in the order of their numbers, at least when it
# runs one call at a time: a server may execute requests as they arrive, and may answer 1 before it has seen 2.
#
# Behaviour: a call whose data exceeds the maximum chunk size is split. The chunks 2 to n are sent first, at the same
# time; chunk 1 is sent only after the POST requests of all others were answered. A server that answers the POST
# of request 2 only after request 1 has arrived never gets request 1.
#
# Output seen:
#   arrived: 2 3 1 4
#   (requests 1 to 3 are the chunks of five datums, 4 is the optimiser step)
#
# Why it matters: a service must accept requests in any order, answer each POST at once, and execute by number. `areal
# serve` journals a request, answers, and computes request n only after request n - 1.
#
# Exit status: 0 while this holds, 1 otherwise.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/env"
"$folder/env/bin/python" -m pip install --quiet --disable-pip-version-check tinker==0.38.0 2>/dev/null
seen=$(HOME="$folder" TINKER_TELEMETRY=0 timeout 120 "$folder/env/bin/python" -W ignore - 2>/dev/null <<'PYTHON'
import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import numpy as np
import tinker
from tinker.proto import tinker_public_pb2 as messages

arrived, kinds = [], {}


class Service(BaseHTTPRequestHandler):
    """Answers what the SDK asks, and records the numbers of training requests as they arrive."""

    protocol_version = "HTTP/1.1"

    def log_message(self, *_):
        pass

    def do_POST(self):
        data = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        name, answer, kind = self.path.rpartition("/")[2], {}, "application/json"
        if name == "config":
            answer = {"fwdbwd_max_chunk_len": 2}
        elif name == "create_session":
            answer = {"session_id": "s", "type": "create_session"}
        elif name == "create_model":
            answer = {"request_id": "s:train:0:0"}
        elif name == "get_info":
            model = {"arch": "", "model_name": "m", "tokenizer_id": "t"}
            answer = {"type": "get_info", "model_id": "s:train:0", "model_data": model, "is_lora": True, "lora_rank": 8}
        elif name == "forward_backward":
            request = messages.ForwardBackwardRequest.FromString(data)
            arrived.append(request.seq_id)
            kinds[f"s:train:0:{request.seq_id}"] = len(request.data)
            answer = {"request_id": f"s:train:0:{request.seq_id}"}
        elif name == "optim_step":
            arrived.append(json.loads(data)["seq_id"])
            answer = {"request_id": "step"}
        elif name == "retrieve_future":
            request = json.loads(data)["request_id"]
            answer = {"type": "create_model", "model_id": "s:train:0"} if request == "s:train:0:0" else {"metrics": {}}
            if request in kinds:
                found = messages.ForwardBackwardOutput(loss_fn_output_type="ArrayRecord")
                record = found.loss_fn_outputs.add(type_tag="ArrayRecord", num_datums=kinds[request])
                values = record.fields["logprobs"]
                values.dtype, values.data = 1, np.zeros(3 * kinds[request], "<f4").tobytes()
                values.offsets = (12 * np.arange(kinds[request] + 1)).astype("<i8").tobytes()
                found.metrics["loss:sum"] = 0.0
                answer, kind = found.SerializeToString(), "application/x-protobuf"
        body = answer if isinstance(answer, bytes) else json.dumps(answer).encode()
        self.send_response(200)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


server = ThreadingHTTPServer(("127.0.0.1", 0), Service)
threading.Thread(target=server.serve_forever, daemon=True).start()
client = tinker.ServiceClient(base_url=f"http://127.0.0.1:{server.server_port}", api_key="tml-stub")
model = client.create_lora_training_client(base_model="m", rank=8)
model = model.result() if hasattr(model, "result") else model
inputs = {"target_tokens": np.array([2, 3, 4]), "weights": np.ones(3, np.float32)}
datum = tinker.Datum(model_input=tinker.ModelInput.from_ints([1, 2, 3]), loss_fn_inputs=inputs)
result = model.forward_backward([datum] * 5, "cross_entropy")
step = model.optim_step(tinker.AdamParams(learning_rate=1e-4))
result.result(), step.result()
print("arrived:", *arrived, flush=True)
import os
os._exit(0)
PYTHON
) || true
echo "$seen"
[[ $seen =~ ^arrived:\ (2\ 3|3\ 2)\ 1\ 4$ ]] || exit 1
