#!/usr/bin/env bash
# ray.init with the address of a cluster does not send the token of the home, with which ray start protects the cluster.
#
# Version: ray 2.60.0, Python 3.11, Linux.
#
# Assumption: `ray start` and `ray.init` find the token of the user in the same way. A cluster that was started in a home
# with ~/.ray/auth_token (`ray get-auth-token --generate` writes it) takes every client that runs in this home.
#
# Behaviour: `ray start` asks for tokens as soon as the file exists. `ray.init("auto")` reads the file and connects.
# `ray.init("127.0.0.1:PORT")` in the same home sends no token and fails after 20 seconds with "Failed to connect to Ray
# cluster", which does not name the token. With RAY_AUTH_MODE=token it connects.
#
# Output seen:
#   auto: connected; address: ConnectionError; address with RAY_AUTH_MODE=token: connected
#
# Why it matters: a launcher is told the address of its cluster (RAY_ADDRESS=HOST:PORT). Once any command has written the
# token, it reports that there is no cluster. It has to set RAY_AUTH_MODE=token where a token exists; a cluster without
# tokens ignores it.
#
# Exit status: 0 while this holds, 1 otherwise.
set -euo pipefail
folder=$(mktemp -d)
head=
finish() {
    [ -z "$head" ] || kill "$head" 2>/dev/null || true
    wait
    rm -rf "$folder"
}
trap finish EXIT
python3 -m venv "$folder/env"
"$folder/env/bin/python" -m pip install -qq --disable-pip-version-check ray==2.60.0
export HOME="$folder/home" RAY_TMPDIR="$folder/ray"
unset RAY_AUTH_MODE RAY_AUTH_TOKEN RAY_AUTH_TOKEN_PATH RAY_ADDRESS
mkdir "$HOME" "$RAY_TMPDIR"
ray=("$folder/env/bin/python" -c 'import sys; from ray.scripts.scripts import main; sys.exit(main())')
"${ray[@]}" get-auth-token --generate >/dev/null 2>&1
"${ray[@]}" start --head --port=6397 --include-dashboard=False --num-cpus=1 --disable-usage-stats --temp-dir "$RAY_TMPDIR" --block >"$folder/log" 2>&1 &
head=$!
for _ in $(seq 60); do
    grep -q "Ray runtime started" "$folder/log" && break
    sleep 0.5
done
connect() {
    timeout 60 "$folder/env/bin/python" - "$1" 2>/dev/null <<'PYTHON' | tail -1
import sys, ray

try:
    ray.init(sys.argv[1], log_to_driver=False, logging_level="ERROR")
    print("connected")
except Exception as error:
    print(type(error).__name__)
PYTHON
}
auto=$(connect auto)
address=$(connect 127.0.0.1:6397)
with_mode=$(RAY_AUTH_MODE=token connect 127.0.0.1:6397)
echo "auto: $auto; address: $address; address with RAY_AUTH_MODE=token: $with_mode"
[ "$auto" = connected ] && [ "$address" = ConnectionError ] && [ "$with_mode" = connected ]
