#!/usr/bin/env bash
# run.sh armhf|arm64 COMMAND…: run COMMAND in a Debian 13 root of that processor, emulated as the oldest board's: Cortex-A7, Cortex-A53.
#
# The root is made once, in ARM_ROOTS (default .thimble/arm), from the host's own Debian archive: the packages of the
# Dockerfile, its pinned wheels, pytest. The checkout is mounted at /src, read-only, THIMBLE_DATA_DIR (models) at /data.
# Exit status 69 (EX_UNAVAILABLE): this machine cannot emulate; a line on standard error says what is missing.
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
checkout=$(cd "$here/../.." && pwd)
architecture=$1; shift
root=${ARM_ROOTS:-$checkout/.thimble/arm}/$architecture
python=$checkout/.venv/bin/python
[ -x "$python" ] || python=python3

case $architecture in
    armhf) triplet=arm-linux-gnueabihf emulator=qemu-arm cpu=cortex-a7 tags="manylinux_2_17_armv7l manylinux2014_armv7l manylinux_2_31_armv7l" ;;
    arm64) triplet=aarch64-linux-gnu emulator=qemu-aarch64 cpu=cortex-a53 tags="manylinux_2_17_aarch64 manylinux2014_aarch64 manylinux_2_28_aarch64" ;;
    *) echo "run.sh: armhf or arm64, not $architecture" >&2; exit 2 ;;
esac

unavailable() { echo "run.sh: no $architecture here: $1" >&2; exit 69; }
[ "$(uname -s)" = Linux ] || unavailable "it needs Linux"
[ "$(id -u)" = 0 ] || unavailable "it needs root, for chroot"
for program in mmdebstrap "$emulator-static" unshare; do
    command -v "$program" >/dev/null || unavailable "$program is missing (apt install mmdebstrap qemu-user-static binfmt-support)"
done
binfmt=/proc/sys/fs/binfmt_misc
[ -e $binfmt/register ] || mount -t binfmt_misc binfmt_misc $binfmt 2>/dev/null || unavailable "binfmt_misc cannot be mounted"
[ -e $binfmt/$emulator ] || update-binfmts --enable $emulator >/dev/null 2>&1 || true
[ -e $binfmt/$emulator ] || unavailable "the kernel has no handler $emulator (apt install binfmt-support)"

make_root() {
    # The Debian archive that the host itself uses, whatever its name; a host without apt's index takes mmdebstrap's default.
    archive=$(apt-get indextargets --format '$(ORIGIN) $(REPO_URI)' 'Created-By: Packages' | awk '$1 == "Debian" && !/security/ { print $2; exit }')
    keyring=/usr/share/keyrings/debian-archive-keyring.gpg
    [ -e $keyring ] || keyring=
    rm -rf "$root"; mkdir -p "$root"
    # Packages are only unpacked, so nothing is emulated here; what their scripts would do is done by hand below.
    mmdebstrap --quiet --mode=root --architectures="$architecture" --variant=extract ${keyring:+--keyring=$keyring} \
        --include=python3,python3-numpy,python3-soundfile,python3-cffi-backend,libopenblas0-pthread,python3-pytest,bash,coreutils,libc-bin,libstdc++6 \
        trixie "$root" ${archive:+"$archive"}
    mkdir -p "$root"/{proc,sys,dev,tmp,src,data,opt/site}
    chmod 1777 "$root/tmp"
    [ -e "$root/bin/sh" ] || ln -s bash "$root/bin/sh"
    # The OpenBLAS that Debian's alternatives would choose.
    echo "/usr/lib/$triplet/openblas-pthread" > "$root/etc/ld.so.conf.d/00-openblas.conf"
    chroot "$root" /sbin/ldconfig
    # shellcheck disable=SC2046
    timeout 300 "$python" -m pip install --quiet --no-deps --require-hashes --only-binary=:all: --implementation cp --python-version 3.13 \
        $(for tag in $tags; do echo --platform "$tag"; done) --target "$root/opt/site" -r "$checkout/deploy/requirements.txt"
    made_of > "$root/made"
}
made_of() { cat "$checkout/deploy/requirements.txt" "${BASH_SOURCE[0]}" | sha256sum; }
is_made() { [ "$(cat "$root/made" 2>/dev/null)" = "$(made_of)" ]; }
# Who runs in the root shares its lock until the end; who makes it anew waits for them.
mkdir -p "$(dirname "$root")"
exec 9> "$root.lock"
flock --shared 9
if ! is_made; then
    flock 9
    is_made || { set +e; (set -e; make_root); made=$?; set -e; }  # within `||`, the first failure would not end make_root
    [ "${made:-0}" = 0 ] || unavailable "its root could not be made; see above"
    flock --shared 9
fi

# Mounts in a namespace of their own, which goes with its last process; `--kill-child` ends that process where unshare is killed.
export root checkout cpu data=${THIMBLE_DATA_DIR:-$checkout/.thimble}
exec unshare --mount --pid --fork --kill-child --propagation private bash -euc '
    mount -t proc proc "$root/proc"
    mount --rbind /dev "$root/dev"
    mount -t sysfs -o ro sysfs "$root/sys"
    mount --bind "$checkout" "$root/src"
    mount -o remount,bind,ro "$root/src"
    mount --bind "$data" "$root/data"
    exec env -i HOME=/tmp TERM=dumb LANG=C.UTF-8 PATH=/usr/bin:/bin:/usr/sbin:/sbin PYTHONDONTWRITEBYTECODE=1 \
        QEMU_CPU=$cpu EMULATED_PROCESSOR=$cpu THIMBLE_DATA_DIR=/data PYTHONPATH=/opt/site OPENBLAS_NUM_THREADS=1 \
        chroot "$root" bash -c "cd /src && exec \"\$@\"" run "$@"' run "$@"
