//! How `weir bench` issues requests.

use clap::ValueEnum;

/// How requests are issued.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum BenchEngine {
    /// A ring for each thread: registered file and buffers, many requests in flight.
    #[value(name = "io_uring")]
    IoUring,
    /// preadv2 and pwritev2: one request of a thread at a time.
    Psync,
    /// No I/O: the cost of the generator itself, on a target of that size.
    Null,
}
