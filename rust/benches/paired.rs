//! Two ways of doing one thing, timed in turn by this process's own processor time: on a machine that others use too, only
//! neighbours in time compare, and what others take does not count.

use std::hint::black_box;

/// Median times of two ways of doing one thing.
pub struct Pair {
    /// Seconds of one call of the first.
    pub first_s: f64,
    /// Seconds of one call of the second.
    pub second_s: f64,
    /// The median over rounds of first / second.
    pub ratio: f64,
}

/// Returns the processor time that this process has used, its system calls included, in seconds.
fn processor_seconds() -> f64 {
    let mut now = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: the pointer is to a timespec of this function, which the call only writes to.
    let failed = unsafe { libc::clock_gettime(libc::CLOCK_PROCESS_CPUTIME_ID, &raw mut now) };
    assert_eq!(failed, 0, "the system has no clock of processor time");
    now.tv_sec as f64 + 1e-9 * now.tv_nsec as f64
}

/// Returns the processor time of one call, in seconds.
fn seconds<T>(calls: usize, work: &mut impl FnMut() -> T) -> f64 {
    let started = processor_seconds();
    for _ in 0..calls {
        black_box(work());
    }
    (processor_seconds() - started) / calls as f64
}

/// Times `first` and `second` alternately, `calls` of each in a round, after one round that is thrown away.
pub fn in_turn<A, B>(rounds: usize, calls: usize, mut first: impl FnMut() -> A, mut second: impl FnMut() -> B) -> Pair {
    let mut times: Vec<(f64, f64)> =
        (0..=rounds).map(|_| (seconds(calls, &mut first), seconds(calls, &mut second))).collect();
    times.remove(0);
    let median = |of: fn(&(f64, f64)) -> f64| {
        let mut values: Vec<f64> = times.iter().map(of).collect();
        values.sort_by(f64::total_cmp);
        values[values.len() / 2]
    };
    Pair { first_s: median(|pair| pair.0), second_s: median(|pair| pair.1), ratio: median(|pair| pair.0 / pair.1) }
}

/// Whether the summary is wanted: a whole `cargo bench`, not a filtered run, a list or a test.
pub fn summary_wanted() -> bool {
    std::env::args().skip(1).all(|argument| argument == "--bench") && std::env::args().len() > 1
}

/// Whether nothing but the summary is wanted: the environment says `RIDGEFILL_BENCH=summary`.
pub fn only_summary() -> bool {
    std::env::var_os("RIDGEFILL_BENCH").is_some_and(|value| value == "summary")
}
