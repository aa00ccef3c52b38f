//! Scripts for guests that write files with their sums.

use std::time::Duration;

/// Longest time for a script of an emulated guest, on a machine that does much else.
pub const SOON: Duration = Duration::from_secs(90);

/// Defines `fill PREFIX`: four files with their sums, synced.
pub const FILL: &str = "
    fill() {
        for file in 1 2 3 4; do
            dd if=/dev/urandom of=/mnt/$1-$file bs=64k count=8 2>/dev/null || return 1
        done
        (cd /mnt && sha256sum $1-* >$1.sums) && sync
    }
";

/// Writes and syncs in the background, one `fill` after the other, until `/tmp/enough` is there. Needs [`FILL`] before it.
pub const KEEP_WRITING: &str = "
    (i=0; until [ -f /tmp/enough ]; do
        fill during-$((i % 3)) || break
        i=$((i + 1)); echo $i >/tmp/new && mv /tmp/new /tmp/rounds
    done
    echo $? >/tmp/code) >/dev/null 2>&1 &
    until [ -s /tmp/rounds ]; do sleep 0.1; done
";

/// Waits for two more complete rounds of [`KEEP_WRITING`] (the one in progress, and one after it), and ends it.
pub const GO_ON: &str = "
    set -e
    seen=$(cat /tmp/rounds)
    until [ $(cat /tmp/rounds) -ge $((seen + 2)) ]; do [ ! -f /tmp/code ]; sleep 0.1; done
    touch /tmp/enough
    until [ -s /tmp/code ]; do sleep 0.1; done
    exit $(cat /tmp/code)
";

/// Checks all sums; prints how many `fill`s there were.
pub const VERIFY: &str = "
    set -e
    cd /mnt
    for sums in *.sums; do sha256sum -c -s $sums; done
    ls *.sums | wc -l
";
