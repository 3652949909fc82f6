#!/usr/bin/env bash
# Makes sure that what Umbra is built with is there; on Debian and its relatives installs what is missing.
#   scripts/setup.sh          what a build and a run need
#   scripts/setup.sh --test   also rustfmt and clippy, which `make test` needs
# It looks for the things themselves rather than for packages, so another MPI, a module file or a home-built compiler
# counts too. When nothing is missing it prints nothing and changes nothing.
set -euo pipefail

for_test=false
case "${1:-}" in
    "") ;;
    --test) for_test=true ;;
    *) echo "setup: expected no argument or --test, found: $*" >&2; exit 2 ;;
esac

have() { command -v "$1" >/dev/null 2>&1; }

# bindgen, which writes the MPI bindings, loads libclang at build time. The unversioned name comes with the -dev package,
# and so do clang's own headers (stddef.h), which it needs as well.
# An llvm-config alone proves nothing: LLVM comes without clang too, so the folder it names has to hold the library.
have_libclang() {
    [ -n "${LIBCLANG_PATH:-}" ] ||
        { have llvm-config && compgen -G "$(llvm-config --libdir)/libclang.so" >/dev/null; } ||
        compgen -G '/usr/lib/llvm-*/lib/libclang.so' >/dev/null ||
        compgen -G '/usr/lib*/libclang.so' >/dev/null ||
        compgen -G '/usr/local/lib/libclang.so' >/dev/null
}

blas="${UMBRA_BLAS:-openblas}"
missing=()  # what is not there, in words
packages=() # the Debian packages that bring it
need() { missing+=("$1"); shift; packages+=("$@"); }

have cc || need "a C compiler and linker (cc)" gcc libc6-dev
have make || need "make" make
have pkg-config || need "pkg-config" pkg-config
have mpirun || need "an MPI launcher (mpirun)" openmpi-bin
have "${MPICC:-mpicc}" || need "the MPI headers and compiler wrapper (mpicc)" libopenmpi-dev
have_libclang || need "libclang with its headers" libclang-dev
{ have pkg-config && pkg-config --exists "$blas"; } || need "a CBLAS known to pkg-config as '$blas'" libopenblas-dev

install_packages() {
    local as_root=()
    if [ "$(id -u)" -ne 0 ]; then
        have sudo || { echo "setup: not root and no sudo here; run as root: apt-get install ${packages[*]}" >&2; exit 1; }
        as_root=(sudo)
    fi
    # Another apt may be at work (a new machine updates itself), and a mirror may stumble: wait and try again rather than
    # make the caller start over.
    local attempt apt=(env DEBIAN_FRONTEND=noninteractive apt-get -qq -y -o Acquire::Retries=5 -o DPkg::Lock::Timeout=600)
    for attempt in 1 2 3 4 5; do
        if "${as_root[@]}" "${apt[@]}" update </dev/null &&
            "${as_root[@]}" "${apt[@]}" install --no-install-recommends "${packages[@]}" </dev/null >/dev/null; then
            return 0
        fi
        [ "$attempt" -eq 5 ] || { echo "setup: apt-get failed (attempt $attempt of 5), again in 15 s" >&2; sleep 15; }
    done
    echo "setup: apt-get could not install: ${packages[*]} (its own message is above)" >&2
    exit 1
}

if [ "${#missing[@]}" -gt 0 ]; then
    echo "setup: missing:"
    printf 'setup:   %s\n' "${missing[@]}"
    if have apt-get; then
        echo "setup: installing with apt-get: ${packages[*]}"
        install_packages
        echo "setup: installed"
    else
        echo "setup: this is not a Debian system, so please install them yourself and run the command again." >&2
        echo "setup: the Debian packages are called: ${packages[*]}" >&2
        exit 1
    fi
fi

if ! have cargo; then
    echo "setup: cargo was not found. Install Rust 1.90 or newer with rustup, or add ~/.cargo/bin to PATH." >&2
    exit 1
fi
if $for_test && ! { cargo fmt --version && cargo clippy --version; } >/dev/null 2>&1; then
    echo "setup: missing: rustfmt or clippy, which 'make test' runs"
    if have rustup; then
        rustup component add rustfmt clippy
    else
        echo "setup: install both for this Rust toolchain and run the command again." >&2
        exit 1
    fi
fi
