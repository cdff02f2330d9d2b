//! Configuration of a relay, with measured defaults and limits.

use crate::probe::Choice;

/// Most relay threads: beyond this the kernel's sockets are the bottleneck, not the event loops.
const THREADS_MAX: usize = 64;
/// Most pairs of all threads. A pair takes two descriptors, so descriptors run out long before.
const PAIRS_MAX: usize = 1 << 20;

/// When a direction changes its mover, and how much it may do per turn.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Thresholds {
    /// Whether splice may be used at all.
    pub splice: bool,
    /// Whether to splice into kTLS sockets; see [`crate::splices_into_kernel_tls`].
    pub splice_into_tls: bool,
    /// Bytes after which a direction may be spliced.
    pub splice_after_bytes: u64,
    /// Average bytes per recent wake-up from which a direction may be spliced.
    pub splice_wake_bytes: u32,
    /// If the average of eight wake-ups is below this, the direction is copied for the rest of the connection.
    pub chatty_wake_bytes: u32,
    /// Most bytes that a direction reads per turn.
    pub turn_bytes: usize,
    /// Most reads of a direction per turn.
    pub turn_reads: u32,
}

impl Default for Thresholds {
    fn default() -> Self {
        Self {
            splice: true,
            splice_into_tls: false,
            splice_after_bytes: 256 * 1024,
            splice_wake_bytes: 32 * 1024,
            chatty_wake_bytes: 4 * 1024,
            turn_bytes: 256 * 1024,
            turn_reads: 16,
        }
    }
}

impl Thresholds {
    /// Copies every byte.
    #[must_use]
    pub fn copy_only() -> Self {
        Self {
            splice: false,
            ..Self::default()
        }
    }

    /// Splices every direction from its first byte on, for tests and measurements.
    #[must_use]
    pub fn splice_at_once() -> Self {
        Self {
            splice: true,
            splice_after_bytes: 0,
            splice_wake_bytes: 0,
            chatty_wake_bytes: 0,
            ..Self::default()
        }
    }
}

/// Configuration of a relay.
#[derive(Clone, Debug)]
pub struct RelayConfig {
    /// Number of event loops; each owns its pairs for their lifetime.
    pub threads: usize,
    /// The driver, from [`crate::probe`].
    pub choice: Choice,
    /// Thresholds of the directions.
    pub thresholds: Thresholds,
    /// Requested size of each pipe. The kernel may grant less; a pipe below 64 KiB is not used.
    pub pipe_bytes: usize,
    /// Most kernel memory of all threads' pipes. Beyond this directions are copied, and counted. An unprivileged user
    /// has 64 MiB for *all* pipes; beyond that the kernel silently makes new pipes of two pages.
    pub pipe_budget_bytes: usize,
    /// User memory for buffers of all threads. Beyond this buffers stay at 16 KiB. No buffer is refused, because a pair
    /// without a buffer cannot move bytes.
    pub buffer_budget_bytes: usize,
    /// Most pairs queued for one thread. Further pairs are refused.
    pub queue_pairs: usize,
    /// Most pairs of all threads. Further pairs are refused.
    pub pairs_max: usize,
    /// Called first on each thread.
    pub on_thread_start: fn(),
}

impl RelayConfig {
    /// Defaults for this machine: half of its CPUs, at least one thread and at most four.
    #[must_use]
    pub fn new(choice: Choice) -> Self {
        let cpus = std::thread::available_parallelism().map_or(1, std::num::NonZero::get);
        Self {
            threads: (cpus / 2).clamp(1, 4),
            choice,
            thresholds: Thresholds::default(),
            pipe_bytes: 256 * 1024,
            pipe_budget_bytes: 48 * 1024 * 1024,
            buffer_budget_bytes: 64 * 1024 * 1024,
            queue_pairs: 1024,
            pairs_max: 65_536,
            on_thread_start: || (),
        }
    }

    /// # Errors
    /// The name of an invalid value.
    pub(crate) fn check(&self) -> Result<(), ConfigError> {
        let within = |name, value: usize, max: usize| {
            if (1..=max).contains(&value) {
                Ok(())
            } else {
                Err(ConfigError { name, value, max })
            }
        };
        let turn_reads = usize::try_from(self.thresholds.turn_reads).unwrap_or(usize::MAX);
        within("threads", self.threads, THREADS_MAX)?;
        within("queue_pairs", self.queue_pairs, PAIRS_MAX)?;
        within("pairs_max", self.pairs_max, PAIRS_MAX)?;
        within("turn_bytes", self.thresholds.turn_bytes, 1 << 30)?;
        within("turn_reads", turn_reads, 1 << 20)?;
        within("pipe_bytes", self.pipe_bytes, 1 << 30)
    }
}

/// An invalid value of [`RelayConfig`].
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("relay: {name} is {value}, but must be between 1 and {max}")]
pub struct ConfigError {
    name: &'static str,
    value: usize,
    max: usize,
}
