//! File descriptors as a budget of the whole process: how many are in use, and which purposes may open another.
//!
//! A look asks the kernel for the number: a count of our own would miss what libraries open, and stay wrong after one
//! mistake. Between two looks each descriptor opened for a client, agent or target is added; closed descriptors are not
//! subtracted. Other descriptors (links, name lookups, pipes for splice) are few, and the next look counts them.

use std::fmt;
use std::fs::{self, File};
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, Mutex, TryLockError};
use std::time::{Duration, Instant};

use rustix::io::Errno;
use rustix::process::{Resource, getrlimit};
use tokio::sync::Notify;

use crate::blocking;

/// Where the kernel lists them.
const LIST: &str = "/proc/self/fd";
/// Descriptors that clients never get, at least and at most: for links, name lookups, reloaded files, probes.
const RESERVE: (u64, u64) = (32, 512);
/// Time between two looks when nothing is opened.
const LOOK_EVERY: Duration = Duration::from_secs(1);
/// The same once no new lanes are allowed.
const LOOK_EVERY_SHORT: Duration = Duration::from_millis(100);
/// Reading the list may take one part in this many of a thread's time.
const LISTING_SHARE: u32 = 20;

/// Purpose of a descriptor, in the order in which purposes get no more.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Use {
    /// One more lane.
    Lane,
    /// One more client to be served, or one more target.
    Tunnel,
    /// A connection at a frontend, even if it is accepted only to be refused.
    Client,
    /// A connection at the agent port: without links there are no tunnels.
    Agent,
}

/// Descriptors in use from which on a purpose gets no more.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
struct Marks {
    lane: u64,
    /// From here on idle lanes are closed.
    low: u64,
    tunnel: u64,
    client: u64,
    agent: u64,
}

impl Marks {
    /// `None`: no limit.
    fn of(limit: Option<u64>) -> Self {
        let Some(limit) = limit else {
            return Self {
                lane: u64::MAX,
                low: u64::MAX,
                tunnel: u64::MAX,
                client: u64::MAX,
                agent: u64::MAX,
            };
        };
        let reserve = (limit / 32).clamp(RESERVE.0, RESERVE.1).min(limit / 4);
        let low = (limit - limit / 8).min(limit - 2 * reserve);
        Self {
            // An eighth lower: lanes that were closed to free descriptors are not reopened at once.
            lane: (limit - limit / 4).min(low - reserve),
            low,
            tunnel: limit - reserve,
            client: limit - reserve / 2,
            agent: limit - reserve / 4,
        }
    }

    fn of_use(&self, purpose: Use) -> u64 {
        match purpose {
            Use::Lane => self.lane,
            Use::Tunnel => self.tunnel,
            Use::Client => self.client,
            Use::Agent => self.agent,
        }
    }

    /// Half the way from `in_use` to the next mark: descriptors that may be opened before another look.
    fn half_way(&self, in_use: u64) -> u64 {
        let marks = [self.lane, self.low, self.tunnel, self.client, self.agent];
        let next = marks.into_iter().filter(|mark| *mark > in_use).min();
        next.map_or(1, |mark| ((mark - in_use) / 2).max(1))
    }
}

/// How descriptors are counted.
enum Counter {
    /// The size of the list, which Linux reports since 6.2: some microseconds for any number of descriptors.
    Size(File),
    /// The entries of the list: about a microsecond each, so never on a thread that carries data.
    List { next: Instant },
    /// There is no such list. Lanes have their own limit, and accept(2) and socket(2) fail when descriptors run out.
    Blind,
}

impl Counter {
    fn new() -> Self {
        let size = |file: &File| file.metadata().map_or(0, |status| status.len());
        match File::open(LIST) {
            Ok(file) if size(&file) > 0 => Self::Size(file),
            Ok(_older_kernel) => Self::List {
                next: Instant::now(),
            },
            Err(error) => {
                tracing::warn!(%error, "descriptors in use are not known: cannot read {LIST}");
                Self::Blind
            }
        }
    }

    /// `None`: not known now. `limit` if no descriptor is free even to open the list.
    fn count(&mut self, limit: u64) -> Option<u64> {
        match self {
            Self::Size(file) => file.metadata().ok().map(|status| status.len()),
            Self::List { next } => {
                let start = Instant::now();
                if start < *next {
                    return None;
                }
                // Without the descriptor that reads the list.
                let count = fs::read_dir(LIST).map(|list| (list.count() as u64).saturating_sub(1));
                *next = Instant::now() + start.elapsed() * LISTING_SHARE;
                match count {
                    Ok(count) => Some(count),
                    Err(error) if Errno::from_io_error(&error) == Some(Errno::MFILE) => Some(limit),
                    Err(_other) => None,
                }
            }
            Self::Blind => None,
        }
    }

    fn is_cheap(&self) -> bool {
        matches!(self, Self::Size(_) | Self::Blind)
    }
}

/// The descriptors of this process.
pub struct Descriptors {
    limit: u64,
    marks: Marks,
    counter: Mutex<Counter>,
    is_cheap: bool,
    /// In use at the last look.
    looked: AtomicU64,
    /// Opened since then.
    opened: AtomicU64,
    /// Another look is due after this many.
    check_after: AtomicU64,
    due: Notify,
}

impl Descriptors {
    /// With the limit in force now.
    #[must_use]
    pub fn of_process() -> Self {
        Self::new(getrlimit(Resource::Nofile).current, Counter::new())
    }

    /// Without a limit.
    #[must_use]
    pub fn unlimited() -> Self {
        Self::new(None, Counter::Blind)
    }

    fn new(limit: Option<u64>, counter: Counter) -> Self {
        let descriptors = Self {
            limit: limit.unwrap_or(u64::MAX),
            marks: Marks::of(limit),
            is_cheap: counter.is_cheap(),
            counter: Mutex::new(counter),
            looked: AtomicU64::new(0),
            opened: AtomicU64::new(0),
            check_after: AtomicU64::new(1),
            due: Notify::new(),
        };
        descriptors.look();
        descriptors
    }

    /// The limit; `None`: no limit.
    #[must_use]
    pub fn limit(&self) -> Option<u64> {
        (self.limit != u64::MAX).then_some(self.limit)
    }

    /// In use: closed descriptors count until the next look.
    #[must_use]
    pub fn in_use(&self) -> u64 {
        let opened = self.opened.load(Relaxed);
        self.looked.load(Relaxed).saturating_add(opened)
    }

    /// Whether one more descriptor may be opened for this purpose. Where a look is cheap, a refusal follows a fresh look.
    #[must_use]
    pub fn has_room(&self, purpose: Use) -> bool {
        let mark = self.marks.of_use(purpose);
        if self.in_use() < mark {
            return true;
        }
        if self.is_cheap {
            self.look();
        }
        self.in_use() < mark
    }

    /// How many lanes to close to free descriptors, if so many are idle.
    #[must_use]
    pub fn lanes_to_close(&self) -> usize {
        let in_use = self.in_use();
        if in_use < self.marks.low {
            return 0;
        }
        usize::try_from(in_use - self.marks.lane).unwrap_or(usize::MAX)
    }

    /// A descriptor was opened. Looks again when a mark may be near; see [`Self::run`] for kernels where a look is slow.
    pub fn opened(&self) {
        let opened = self.opened.fetch_add(1, Relaxed) + 1;
        if opened < self.check_after.load(Relaxed) {
            return;
        }
        if self.is_cheap {
            self.look();
        } else {
            self.due.notify_one();
        }
    }

    /// Counts the descriptors. Returns whether that was done now: an older count must not be acted upon twice.
    fn look(&self) -> bool {
        let mut counter = match self.counter.try_lock() {
            Ok(counter) => counter,
            Err(TryLockError::Poisoned(poisoned)) => poisoned.into_inner(),
            // Another thread looks.
            Err(TryLockError::WouldBlock) => return false,
        };
        let before = self.opened.load(Relaxed);
        match counter.count(self.limit) {
            Some(count) => {
                self.looked.store(count, Relaxed);
                // Descriptors opened meanwhile are counted twice until the next look, and never missed.
                self.opened.fetch_sub(before, Relaxed);
                let after = self.marks.half_way(count);
                self.check_after.store(after, Relaxed);
                true
            }
            None if matches!(*counter, Counter::Blind) => {
                self.opened.fetch_sub(before, Relaxed);
                self.check_after.store(u64::MAX, Relaxed);
                true
            }
            None => false,
        }
    }

    /// Looks again and again until dropped. When descriptors run low, calls `close` with the number of lanes to close, at
    /// most once every `patience`.
    pub async fn run(self: Arc<Self>, patience: Duration, close: impl Fn(usize)) {
        let mut closed: Option<tokio::time::Instant> = None;
        loop {
            let every = if self.has_room(Use::Lane) {
                LOOK_EVERY
            } else {
                LOOK_EVERY_SHORT
            };
            let _early = tokio::time::timeout(every, self.due.notified()).await;
            let counted = if self.is_cheap {
                self.look()
            } else {
                let looking = Arc::clone(&self);
                // Not counted this time: the next look comes soon.
                blocking::run(move || looking.look()).await.unwrap_or(false)
            };
            let lanes = self.lanes_to_close();
            if counted && lanes > 0 && closed.is_none_or(|at| at.elapsed() >= patience) {
                closed = Some(tokio::time::Instant::now());
                close(lanes);
            }
        }
    }
}

/// In use, and the limit.
impl fmt::Display for Descriptors {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} of {}", self.in_use(), self.limit)
    }
}

impl fmt::Debug for Descriptors {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Descriptors({self})")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn counted(limit: u64, in_use: u64) -> Descriptors {
        let descriptors = Descriptors::new(Some(limit), Counter::Blind);
        descriptors.looked.store(in_use, Relaxed);
        descriptors
    }

    /// Limit (peers): File descriptors in use | at 3/4 no additional lanes; at 7/8 idle lanes are closed. Near the
    /// limit clients and dials are refused, then clients and at last agents wait
    #[test]
    fn lanes_have_no_room_first_then_clients_then_agents() {
        let order = [Use::Lane, Use::Tunnel, Use::Client, Use::Agent];
        for (limit, marks) in [
            (1024, [768, 992, 1008, 1016]),
            (20_000, [15_000, 19_488, 19_744, 19_872]),
            (256, [160, 224, 240, 248]),
            (64, [16, 48, 56, 60]),
        ] {
            for (purpose, mark) in order.into_iter().zip(marks) {
                assert!(
                    counted(limit, mark - 1).has_room(purpose),
                    "{limit} {purpose:?}"
                );
                assert!(
                    !counted(limit, mark).has_room(purpose),
                    "{limit} {purpose:?}"
                );
            }
        }
        assert!(
            order
                .into_iter()
                .all(|purpose| Descriptors::unlimited().has_room(purpose))
        );
    }

    /// Limit (peers): File descriptors in use
    #[test]
    fn idle_lanes_are_closed_down_to_the_lane_threshold() {
        for (in_use, lanes) in [(895, 0), (896, 128), (1000, 232)] {
            assert_eq!(counted(1024, in_use).lanes_to_close(), lanes);
        }
        assert_eq!(Descriptors::unlimited().lanes_to_close(), 0);
    }

    /// Both counters see files that this process opens without reporting them.
    #[test]
    fn kernel_counters_include_unreported_files() {
        let list = Counter::List {
            next: Instant::now(),
        };
        for mut counter in [Counter::new(), list] {
            let before = counter.count(0).unwrap();
            let files: Vec<File> = (0..500).map(|_| File::open("/dev/null").unwrap()).collect();
            if let Counter::List { next } = &mut counter {
                *next = Instant::now();
            }
            let after = counter.count(0).unwrap();
            // Other tests open and close files meanwhile.
            assert!(
                (before + 300..before + 700).contains(&after),
                "{before} {after}"
            );
            drop(files);
        }
    }

    #[test]
    fn a_long_list_is_not_read_again_at_once() {
        let mut counter = Counter::List {
            next: Instant::now() + Duration::from_secs(60),
        };
        assert_eq!(counter.count(9), None);
    }

    #[test]
    fn descriptors_opened_since_the_last_check_are_counted() {
        let never = Instant::now() + Duration::from_secs(600);
        let descriptors = Descriptors::new(Some(1024), Counter::List { next: never });
        descriptors.looked.store(700, Relaxed);
        descriptors.check_after.store(100, Relaxed);
        for _opened in 0..70 {
            descriptors.opened();
        }
        assert_eq!(descriptors.in_use(), 770);
        assert!(!descriptors.has_room(Use::Lane) && descriptors.has_room(Use::Tunnel));
    }

    #[test]
    fn a_check_is_due_halfway_to_the_next_threshold() {
        let marks = Marks::of(Some(1024));
        let steps = [0, 700, 767, 768, 900, 1007, 1016, 5000].map(|in_use| marks.half_way(in_use));
        assert_eq!(steps, [384, 34, 1, 64, 46, 1, 1, 1]);
    }

    #[tokio::test(start_paused = true)]
    async fn lanes_are_closed_at_once_and_then_once_per_interval() {
        let descriptors = Arc::new(counted(1024, 900));
        let closed = Mutex::new(Vec::new());
        let running = Arc::clone(&descriptors).run(Duration::from_secs(2), |lanes| {
            closed.lock().unwrap().push(lanes);
        });
        let _over = tokio::time::timeout(Duration::from_secs(5), running).await;
        assert_eq!(*closed.lock().unwrap(), [132, 132, 132]);
    }
}
