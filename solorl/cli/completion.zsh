#compdef solo
_solo() {
    local -a found
    found=("${(@f)$($words[1] completion words "${(@)words[2,CURRENT]}" 2>/dev/null)}")
    found=(${found:#})
    if (( ! $#found )); then _files; return; fi
    compadd -- ${found:#*/}
    compadd -S '' -- ${(M)found:#*/}
}
compdef _solo solo
