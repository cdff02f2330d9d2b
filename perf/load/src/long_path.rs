//! A long path: delays packets between two network namespaces, limits their rate and drops some. It works on packets, so the
//! kernel's TCP reacts to distance as in reality. Made for hosts whose kernel has no netem. Each direction has two threads;
//! time bounds what it holds.

use std::fs::File;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::thread;
use std::time::{Duration, Instant};

use adit_perf_plan::Shape;
use anyhow::Context as _;
use rand::rngs::StdRng;
use rand::{Rng as _, SeedableRng as _};
use rustix::fd::AsFd as _;
use rustix::thread::{LinkNameSpaceType, move_into_link_name_space};
use tappers::{Interface, Tun};

/// Name of the device at both ends.
const DEVICE: &str = "path";
/// Upper bound of a packet: above the default MTU.
const PACKET_BYTES_MAX: usize = 64 * 1024;
/// Packets between the threads of one direction: time is the limit that applies.
const PACKETS_MAX: usize = 64 * 1024;

/// One direction. Times count from an epoch that the caller chooses.
struct Direction {
    delay: Duration,
    nanos_per_byte: f64,
    queue: Duration,
    loss: f64,
    random: StdRng,
    /// Time at which all earlier packets have left.
    free_at: Duration,
}

impl Direction {
    /// `seed`: makes each run lose the same packets of a sequence.
    fn new(shape: &Shape, seed: u64) -> Self {
        Self {
            delay: Duration::from_millis(shape.delay_ms),
            nanos_per_byte: 8e3 / f64::from(shape.mbit_s),
            queue: Duration::from_millis(shape.queue_ms),
            loss: shape.loss_percent / 100.0,
            random: StdRng::seed_from_u64(seed),
            free_at: Duration::ZERO,
        }
    }

    /// Arrival time of a packet of `bytes` that is sent at `now`; `None` if it is lost.
    fn arrival(&mut self, now: Duration, bytes: usize) -> Option<Duration> {
        let begin = self.free_at.max(now);
        if begin - now > self.queue || self.random.random_bool(self.loss) {
            return None;
        }
        let nanos = bytes as f64 * self.nanos_per_byte;
        self.free_at = begin + Duration::from_secs_f64(nanos / 1e9);
        Some(self.free_at + self.delay)
    }
}

/// A packet and its arrival time.
type Held = (Instant, Vec<u8>);

/// Forwards packets until standard input closes. `near` and `far` are network namespaces, as in `/proc/PID/ns/net`. Each gets a
/// device, which is printed as JSON and needs an address.
///
/// # Errors
/// The shape is invalid, or a device cannot be created.
pub(crate) fn serve(near: &Path, far: &Path, shape: &Shape) -> anyhow::Result<()> {
    shape.check()?;
    let [near, far] = [device(near.to_owned())?, device(far.to_owned())?].map(Arc::new);
    carry(&near, &far, Direction::new(shape, 0));
    carry(&far, &near, Direction::new(shape, 1));
    println!("{{\"device\":\"{DEVICE}\"}}");
    crate::parent_death::until_stdin_closes()
}

/// Creates the device of one end. A thread of its own enters the namespace, so that other threads stay outside.
fn device(namespace: PathBuf) -> anyhow::Result<Tun> {
    let made = thread::spawn(move || {
        let file =
            File::open(&namespace).with_context(|| format!("opening {}", namespace.display()))?;
        move_into_link_name_space(file.as_fd(), Some(LinkNameSpaceType::Network))
            .with_context(|| format!("entering {}: this needs root", namespace.display()))?;
        let tun = Tun::new_named(Interface::new(DEVICE)?);
        tun.context("making a tunnel device: is there a /dev/net/tun?")
    });
    let failed = |_panic| anyhow::bail!("the thread that makes a device has failed");
    made.join().unwrap_or_else(failed)
}

/// Starts both threads of a direction; they live as long as the process.
fn carry(from: &Arc<Tun>, to: &Arc<Tun>, direction: Direction) {
    let (from, to) = (Arc::clone(from), Arc::clone(to));
    let (held, due) = sync_channel(PACKETS_MAX);
    thread::spawn(move || take(&from, direction, &held));
    thread::spawn(move || give(&to, &due));
}

fn take(from: &Tun, mut direction: Direction, held: &SyncSender<Held>) {
    let epoch = Instant::now();
    let mut buffer = vec![0; PACKET_BYTES_MAX];
    loop {
        // The device is down, or gone with its namespace.
        let Ok(length) = from.recv(&mut buffer) else {
            thread::sleep(Duration::from_millis(1));
            continue;
        };
        let packet = buffer.get(..length).unwrap_or_default();
        if let Some(arrival) = direction.arrival(epoch.elapsed(), length)
            && held.send((epoch + arrival, packet.to_vec())).is_err()
        {
            return;
        }
    }
}

fn give(to: &Tun, due: &Receiver<Held>) {
    while let Ok((arrival, packet)) = due.recv() {
        let wait = arrival.saturating_duration_since(Instant::now());
        if !wait.is_zero() {
            thread::sleep(wait);
        }
        // A device that is down loses the packet, as a cable would.
        let _sent = to.send(&packet);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SHAPE: Shape = Shape {
        delay_ms: 50,
        mbit_s: 100,
        queue_ms: 100,
        loss_percent: 0.0,
        congestion: None,
    };

    fn micros(micros: u64) -> Duration {
        Duration::from_micros(micros)
    }

    #[test]
    fn packets_leave_at_the_rate_and_arrive_after_the_delay() {
        let mut direction = Direction::new(&SHAPE, 1);
        // 1250 bytes are 100 us at 100 Mbit/s.
        for (now, arrives) in [(0, 50_100), (0, 50_200), (10, 50_300), (1_000, 51_100)] {
            let arrival = direction.arrival(micros(now), 1250);
            assert_eq!(arrival, Some(micros(arrives)), "sent at {now} us");
        }
    }

    #[test]
    fn packets_beyond_the_buffer_are_dropped() {
        let mut direction = Direction::new(&SHAPE, 1);
        let passed = (0..2000).filter(|_| direction.arrival(micros(0), 1250).is_some());
        assert_eq!(
            passed.count(),
            1001,
            "100 ms of 100 us, and the one that leaves"
        );
        assert!(
            direction.arrival(micros(200), 1250).is_some(),
            "there is room again"
        );
    }

    #[test]
    fn packet_loss_has_the_given_rate_and_repeats_for_a_seed() {
        let lossy = Shape {
            loss_percent: 1.0,
            ..SHAPE
        };
        let lost = |seed| {
            let mut direction = Direction::new(&lossy, seed);
            let lost =
                (0..100_000_u64).filter(|at| direction.arrival(micros(at * 100), 100).is_none());
            lost.collect::<Vec<_>>()
        };
        let first = lost(1);
        assert!((900..=1_100).contains(&first.len()), "{}", first.len());
        assert_eq!(first, lost(1));
        assert_ne!(first, lost(2));
    }
}
