#!/bin/sh
# Builds the Dockerfile without a container engine on this machine, without a registry of images and without a daemon:
# Debian's packages make a base image and a root with buildah, which builds in a chroot. Then a training runs in the image.
#   sudo sh cloud/image.sh FOLDER [--target dev | --build-arg NAME=VALUE ...]
# FOLDER gets about 7 GB. Needs root, Linux, mmdebstrap. TORCH_INDEX, PIP_FIND_LINKS: where pip finds torch.
set -eu
if [ "${1:-}" = --inside ]; then
    folder=$2 checkout=$3
    shift 3
    root=$folder/builder
    mount --bind "$root" "$root" # buildah wants its root to be a mount
    mount -t proc proc "$root/proc"
    mkdir -p "$root/in/src" "$root/in/wheels"
    mount --bind "$checkout" "$root/in/src"
    pip='[global]\ncert = /ca.crt\n'
    if [ -d "${PIP_FIND_LINKS:-}" ]; then
        mount --bind "$PIP_FIND_LINKS" "$root/in/wheels"
        pip="${pip}find-links = /wheels\n"
    fi
    printf "$pip" > "$root/in/pip.conf"
    cp /etc/ssl/certs/ca-certificates.crt "$root/in/ca.crt"
    cp /etc/resolv.conf /etc/hosts "$root/etc/"
    cp "$folder/base.tar" "$root/in/base.tar"
    inside() { chroot "$root" env STORAGE_DRIVER=vfs "$@" 2>> "$folder/warnings.txt"; }
    base=docker.io/library/debian:bookworm-slim
    if ! inside buildah inspect --type image "$base" > /dev/null; then
        empty=$(inside buildah from scratch)
        inside buildah add "$empty" /in/base.tar / > /dev/null
        inside buildah commit --quiet --rm "$empty" "$base" > /dev/null
    fi
    inside buildah bud --isolation chroot --network host --pull-never --layers --tag solorl \
        --volume /in/wheels:/wheels:ro --volume /in/ca.crt:/ca.crt:ro --volume /in/pip.conf:/etc/pip.conf:ro \
        --build-arg "TORCH_INDEX=${TORCH_INDEX:-https://download.pytorch.org/whl/cpu}" "$@" /in/src
    case "$*" in *"--target"*) exit 0 ;; esac
    container=$(inside buildah from --pull-never localhost/solorl)
    solo() { inside buildah run --isolation chroot "$container" -- tini -s -- solo "$@"; }
    echo "SIZE $(inside buildah images --format '{{.Size}}' localhost/solorl)"
    echo "USER $(inside buildah run --isolation chroot "$container" -- id -u)"
    echo "VERSION $(solo --version)"
    solo train ppo --env-id CartPole-v1 --total-timesteps 5000 --seed 1
    inside buildah rm "$container" > /dev/null
    exit 0
fi
folder=$(mkdir -p "${1:?sh cloud/image.sh FOLDER}" && cd "$1" && pwd)
checkout=$(cd "$(dirname "$0")/.." && pwd)
shift
mirror=http://deb.debian.org/debian
[ -e "$folder/base.tar" ] || mmdebstrap --quiet --variant=minbase --include=ca-certificates bookworm "$folder/base.tar" $mirror
[ -e "$folder/builder/usr/bin/buildah" ] ||
    mmdebstrap --quiet --variant=minbase --include=buildah,ca-certificates bookworm "$folder/builder" $mirror
exec unshare --mount sh "$checkout/cloud/image.sh" --inside "$folder" "$checkout" "$@"
