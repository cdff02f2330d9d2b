//! What an owner may set, with defaults that measurements chose, and the limits they are checked against.

use crate::probe::Choice;

/// Most relay threads: beyond this the machine's sockets are the limit, not our loops.
const THREADS_MAX: usize = 64;
/// Most pairs of all threads. A pair takes two descriptors, so descriptors run out long before.
const PAIRS_MAX: usize = 1 << 20;

/// When a direction changes its mover and how much it may do before others have their turn.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Thresholds {
    /// Whether splice may be used at all.
    pub splice: bool,
    /// And into sockets on kernel TLS, see [`crate::splices_into_kernel_tls`].
    pub splice_into_tls: bool,
    /// A direction is copied until it has moved this many bytes.
    pub splice_after_bytes: u64,
    /// And until its last wake-ups brought at least this many bytes each, on average.
    pub splice_wake_bytes: u32,
    /// Eight wake-ups in a row below this average end splicing for the rest of the connection.
    pub chatty_wake_bytes: u32,
    /// Bytes a direction may read before other pairs have their turn.
    pub turn_bytes: usize,
    /// Reads a direction may make before other pairs have their turn.
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
    /// Every byte is copied.
    #[must_use]
    pub fn copy_only() -> Self {
        Self {
            splice: false,
            ..Self::default()
        }
    }

    /// Every direction is spliced from its first byte read, and stays so: for tests and measurements.
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

/// How a relay is built.
#[derive(Clone, Debug)]
pub struct RelayConfig {
    /// Event loops; each owns its pairs for their lifetime.
    pub threads: usize,
    /// What [`crate::probe`] found.
    pub choice: Choice,
    /// When movers change.
    pub thresholds: Thresholds,
    /// Size asked for each pipe. The kernel may give less: below 64 KiB the pipe is not used.
    pub pipe_bytes: usize,
    /// Kernel memory that pipes of all threads may pin. Beyond it directions are copied, and counted. A user without
    /// privileges has 64 MiB for *all* pipes, after which new ones silently shrink to two pages.
    pub pipe_budget_bytes: usize,
    /// User memory for buffers of all threads. Beyond it buffers do not grow past 16 KiB; none is refused, since a
    /// pair that holds no buffer cannot move.
    pub buffer_budget_bytes: usize,
    /// Pairs that wait for one thread to notice them. Full means a refusal.
    pub queue_pairs: usize,
    /// Pairs of all threads. Full means a refusal.
    pub pairs_max: usize,
    /// The first thing each thread does.
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
    /// A value that cannot work, by name.
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

/// A value of [`RelayConfig`] that cannot work.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("relay: {name} is {value}, but must be between 1 and {max}")]
pub struct ConfigError {
    name: &'static str,
    value: usize,
    max: usize,
}
