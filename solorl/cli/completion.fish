function __solo_words
    set -l before (commandline -opc)
    solo completion words $before[2..-1] (commandline -ct) 2>/dev/null
end
complete -c solo -a '(__solo_words)'
