#!/bin/sh
# Get Icarus Verilog without root: download Debian's or Ubuntu's package and unpack it under DEST.
#
#   scripts/get_iverilog.sh [DEST]        DEST defaults to .tools/iverilog
#
# Afterwards DEST/bin/iverilog and DEST/bin/vvp work from anywhere. Running it again does nothing; an `iverilog` on PATH
# that is new enough makes it unnecessary. Nothing outside DEST is written: apt runs with package lists and a cache of
# its own, so an ordinary user with empty system lists can do this too.
set -eu

need=11
dest=${1:-.tools/iverilog}

say() { echo "get_iverilog: $*"; }
fail() {
    echo "get_iverilog: $*; install the package 'iverilog' (version $need or newer) yourself," \
        "for instance: sudo apt-get install iverilog" >&2
    exit 1
}

# The major version of the iverilog in $1, or 0.
major() {
    version=$("$1" -V 2>/dev/null | sed -n 's/^Icarus Verilog version \([0-9][0-9]*\).*/\1/p' | head -n 1) || version=
    echo "${version:-0}"
}

if [ "$(major iverilog)" -ge "$need" ]; then
    say "using $(command -v iverilog), version $(major iverilog)"
    exit 0
fi
if [ -x "$dest/bin/iverilog" ] && [ "$(major "$dest/bin/iverilog")" -ge "$need" ]; then
    say "using $dest/bin/iverilog, version $(major "$dest/bin/iverilog")"
    exit 0
fi
for tool in apt-get dpkg; do
    command -v "$tool" >/dev/null || fail "no Icarus Verilog here and no $tool to get it with"
done

mkdir -p "$dest" 2>/dev/null || fail "cannot create $dest"
dest=$(cd "$dest" && pwd)
apt_dir=$dest/iverilog-apt
mkdir -p "$apt_dir/state/lists/partial" "$apt_dir/cache/archives/partial" "$apt_dir/debs" 2>/dev/null ||
    fail "cannot write to $dest"
log=$apt_dir/log

# Downloads only; APT::Sandbox::User because the account _apt cannot write below DEST.
apt() {
    apt-get -qq -o Dir::State="$apt_dir/state" -o Dir::State::status=/var/lib/dpkg/status -o Dir::Cache="$apt_dir/cache" \
        -o APT::Sandbox::User= -o Acquire::Retries=2 -o Acquire::http::Timeout=20 \
        -o Acquire::Languages=none "$@" >>"$log" 2>&1
}

# Unpack the packages named, beside what is there.
unpack() {
    rm -f "$apt_dir"/debs/*.deb
    (cd "$apt_dir/debs" && apt download "$@") || fail "apt could not download $* (see $log)"
    for package in "$apt_dir"/debs/*.deb; do
        dpkg -x "$package" "$dest/iverilog-root" || fail "cannot unpack $package"
    done
}

say "downloading Debian package iverilog into $dest, without root"
: >"$log"
apt update || fail "apt could not fetch its package lists (see $log)"
# Only what this script makes is ever removed: DEST may be somebody's folder with a bin of their own.
rm -rf "$dest/iverilog-root"
unpack iverilog

ivl=$(find "$dest/iverilog-root/usr/lib" -type f -name ivl | head -n 1)
[ -n "$ivl" ] || fail "the package iverilog has no ivl"
base=$(dirname "$ivl")
# A bare machine lacks libreadline, the one library of vvp that is not everywhere.
libraries=
if ldd "$dest/iverilog-root/usr/bin/vvp" | grep -q 'libreadline.*not found'; then
    (unpack libreadline8t64) 2>/dev/null || unpack libreadline8
    multiarch=$(basename "$(dirname "$base")")
    libraries="LD_LIBRARY_PATH='$dest/iverilog-root/usr/lib/$multiarch:$dest/iverilog-root/lib/$multiarch' "
fi

mkdir -p "$dest/bin"
wrapper() {
    # The package is built for /usr/lib; -B and -M tell it where its parts are now.
    printf '#!/bin/sh\n%sexec "%s" "%s" "$@"\n' "$libraries" "$dest/iverilog-root/usr/bin/$1" "$2$base" >"$dest/bin/$1"
    chmod +x "$dest/bin/$1"
}
wrapper iverilog -B
wrapper vvp -M
rm -rf "$apt_dir"

version=$(major "$dest/bin/iverilog")
[ "$version" -ge "$need" ] || fail "apt has Icarus Verilog $version, which is too old"
say "done: $dest/bin/iverilog, version $version"
