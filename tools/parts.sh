# Parts of a measurement, each within a time of its own; sourced by a script once it has set `out`, a folder, `ends`,
# the value of SECONDS at which all has to be over, and `wanted`, names with a space before and after each. What has
# come to its limit gets the signal STOP (TERM), and is killed GRACE seconds (5) later. `parts.txt` in the folder gets a
# line a part, which `part_summary.py` reads.

# run NAME LIMIT COMMAND...: at most LIMIT seconds, of which a third must be left.
run() {
    local name=$1 limit=$2 left=$((ends - SECONDS)) began=$SECONDS
    shift 2
    if ((left * 3 < limit)); then
        echo "== $name: skipped, $left s left"
        printf '%s\tskipped\t%s\t%s\n' "$name" 0 "${*//$'\n'/ }" >>"$out/parts.txt"
        return
    fi
    timeout -s "${STOP:-TERM}" -k "${GRACE:-5}" $((limit < left ? limit : left)) "$@" >"$out/$name.log" 2>&1
    local code=$?
    echo "== $name: exit code $code, $((SECONDS - began)) s: $*"
    printf '%s\t%s\t%s\t%s\n' "$name" $code $((SECONDS - began)) "${*//$'\n'/ }" >>"$out/parts.txt"
    tail -n 40 "$out/$name.log" | figures
}

# Leaves out what servers log, and the settings of lines of JSON.
figures() {
    python -c '
import json, sys
servers = "timestamp=", "baton: ", "loadgen: "
settings = "dtype quantize_head kv_dtype shape sampling numerics front burners tables device torch triton cuda"
for line in sys.stdin:
    if line.startswith(servers):
        continue
    if line.startswith("{"):
        line = json.dumps({k: v for k, v in json.loads(line).items() if k not in settings.split()}) + "\n"
    sys.stdout.write(line[:400].rstrip("\n") + "\n")'
}

wants() { [[ $wanted == *" $1 "* ]]; }
