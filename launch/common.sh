# shellcheck shell=bash
# What the launchers share: help, errors, flags, and commands that --dry_run prints in place of running them.

python=${PYTHON:-python}
help='' dry_run='' flags=()

# Prints the comment that a launcher begins with.
usage() {
  sed -n '2,/^$/s/^# \{0,1\}//p' "$0"
}

fail() {
  printf 'error: %s\n' "$*" >&2
  exit 2
}

# parse 'name= spot' ARGUMENTS: --name=VALUE sets name, --spot sets spot. All that is not known is a flag of main.
parse() {
  local known=" $1 help dry_run " argument key
  shift
  for argument; do
    key=${argument%%=*}
    key=${key#--}
    if [[ $argument != --* ]]; then
      flags+=("$argument")
    elif [[ $known == *" $key= "* ]]; then
      [[ $argument == *=?* ]] || fail "--$key needs a value: --$key=…"
      printf -v "$key" %s "${argument#*=}"
    elif [[ $known == *" $key "* ]]; then
      [[ $argument != *=* ]] || fail "$argument: --$key takes no value"
      printf -v "$key" 1
    else
      flags+=("$argument")
    fi
  done
  if [[ $help ]]; then
    usage
    exit
  fi
}

# main's own words would come once a process, or in a log far away.
need_config() {
  local flag
  for flag in ${flags[@]+"${flags[@]}"}; do
    if [[ $flag =~ ^--?(config|flagfile)(=|$) ]]; then return; fi
  done
  fail "--config is missing, e.g. --config=configs/star_tiny_joint.py"
}

need_python() {
  command -v "$python" >/dev/null || fail "no $python: activate the environment, or set PYTHON=.venv/bin/python"
}

# Prints words as one line that a shell reads back as the same words.
quoted() {
  local line='' word rest
  for word; do
    if [[ -z $word || $word == *[!A-Za-z0-9_@%+=:,./-]* ]]; then
      rest=$word
      word="'"
      while [[ $rest == *\'* ]]; do
        word+="${rest%%\'*}'\\''"
        rest=${rest#*\'}
      done
      word+="$rest'"
    fi
    line+="${line:+ }$word"
  done
  printf '%s\n' "$line"
}

run() {
  if [[ $dry_run ]]; then quoted "$@"; else "$@"; fi
}

# The same in place of this shell, so that signals reach the command.
run_last() {
  if [[ $dry_run ]]; then quoted "$@"; else exec "$@"; fi
}
