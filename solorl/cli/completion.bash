_solo() {
    local IFS=$'\n'
    COMPREPLY=($("${COMP_WORDS[0]}" completion words "${COMP_WORDS[@]:1:COMP_CWORD}" 2>/dev/null))
    if [[ "${COMPREPLY[*]}" == */* ]]; then compopt -o filenames 2>/dev/null; fi
}
complete -o default -F _solo solo
