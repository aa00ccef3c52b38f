//! CPU time of this process and of its threads.

use std::time::Duration;

/// CPU time of the calling thread, user and system together.
#[must_use]
pub fn of_this_thread() -> Duration {
    usage(libc::RUSAGE_THREAD)
}

/// CPU time of all threads of this process, user and system together.
#[must_use]
pub fn of_this_process() -> Duration {
    usage(libc::RUSAGE_SELF)
}

/// CPU time of the child processes that have ended and were waited for, and of their descendants.
#[must_use]
pub fn of_ended_children() -> Duration {
    usage(libc::RUSAGE_CHILDREN)
}

fn usage(who: i32) -> Duration {
    // SAFETY: all-zero is a valid rusage.
    let mut usage: libc::rusage = unsafe { std::mem::zeroed() };
    // SAFETY: `usage` is writable and `who` one of the kernel's constants, so the call cannot fail.
    unsafe { libc::getrusage(who, &raw mut usage) };
    let of = |time: libc::timeval| Duration::new(time.tv_sec as u64, time.tv_usec as u32 * 1000);
    of(usage.ru_utime) + of(usage.ru_stime)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn work_is_counted_where_it_is_done() {
        let (thread, process) = (of_this_thread(), of_this_process());
        let children = of_ended_children();
        let busy = "i=0; while [ $i -lt 20000 ]; do i=$((i+1)); done";
        assert!(std::process::Command::new("sh").args(["-c", busy]).status().unwrap().success());
        assert!(of_ended_children() - children >= Duration::from_millis(2));
        let worker = std::thread::spawn(|| {
            while of_this_thread() < Duration::from_millis(20) {
                std::hint::spin_loop();
            }
        });
        worker.join().unwrap();
        assert!(of_this_process() - process >= Duration::from_millis(20));
        assert!(of_this_thread() - thread < Duration::from_millis(20));
    }
}
