//! Open-loop round trips of 64 bytes: requests go out at a fixed rate, and each is timed from the moment it was due. A stall
//! therefore delays every request in it, as with independent users.

use std::num::NonZeroU64;
use std::time::{Duration, Instant};

use adit_perf_plan::Sample;
use anyhow::{Context as _, ensure};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::sync::mpsc;
use tokio::task::JoinSet;

use super::echo::{MESSAGE_BYTES, message};
use super::{Load, all, cpu_each};
use crate::process;
use crate::way::{Target, Tunnel};

/// Most due requests of one connection that its task has not written yet.
const DUE_MAX: usize = 16 * 1024;
/// Time limit for answers after the last request was due.
const DRAIN_LIMIT: Duration = Duration::from_secs(5);

/// Measures each rate.
pub(super) async fn measure(load: &Load, sample: &mut Sample) -> anyhow::Result<()> {
    for &rate in &load.plan.rates {
        let name = format!("paced_{rate}");
        let (samples, unanswered, cpu) = at_rate(load, rate).await.with_context(|| name.clone())?;
        cpu_each(load, sample, &name, samples.len(), cpu)?;
        sample.value(format!("{name}_unanswered"), unanswered as f64);
        sample.latencies(&name, samples)?;
    }
    Ok(())
}

/// A duration per due request; how many were not answered, which count with the time waited for them; and the CPU time of the
/// processes before the first.
type Paced = (Vec<Duration>, usize, f64);

#[expect(
    clippy::disallowed_methods,
    reason = "the load generator is no service: it may end where a host refuses a thread"
)]
async fn at_rate(load: &Load, rate: u32) -> anyhow::Result<Paced> {
    ensure!(rate > 0, "a rate of 0 asks nothing");
    let connections = load.plan.rate_connections.max(1);
    // Open all tunnels first: the clock starts afterwards.
    let tunnels = load.dialer.open_all(Target::Echo, connections).await?;
    let cpu = process::cpu_seconds(&load.processes)?;
    let schedule = Schedule::new(rate, load.plan.lasting());
    let give_up = schedule.end() + DRAIN_LIMIT;
    let mut asking = JoinSet::new();
    let mut queues = Vec::with_capacity(connections);
    for tunnel in tunnels {
        let (due, queue) = mpsc::channel(DUE_MAX);
        queues.push(due);
        asking.spawn(connection(tunnel, queue, give_up));
    }
    let pacing = tokio::task::spawn_blocking(move || pace(schedule, &queues));
    let (mut samples, mut unanswered) = (Vec::new(), 0);
    for one in all(asking).await? {
        samples.extend(one.0);
        unanswered += one.1;
    }
    // The connection's queue was full: count the longest possible delay.
    let missed = pacing.await?;
    unanswered += missed.len();
    let waited = |due| give_up.saturating_duration_since(due);
    samples.extend(missed.into_iter().map(waited));
    Ok((samples, unanswered, cpu))
}

/// Times at which requests are due.
#[derive(Clone, Copy, Debug)]
struct Schedule {
    start: Instant,
    count: u32,
    rate: u32,
}

impl Schedule {
    fn new(rate: u32, lasting: Duration) -> Self {
        #[expect(
            clippy::cast_possible_truncation,
            clippy::cast_sign_loss,
            reason = "a rate below 2^32 for at most ten minutes, cut at the largest count"
        )]
        let count = (f64::from(rate) * lasting.as_secs_f64()).ceil().max(1.0) as u32;
        Self {
            // Time for the pacing thread to start.
            start: Instant::now() + Duration::from_millis(20),
            count,
            rate,
        }
    }

    fn due(self, number: u32) -> Instant {
        self.start + Duration::from_secs(1) * number / self.rate
    }

    fn end(self) -> Instant {
        self.due(self.count)
    }
}

/// Tells each connection in turn when its next request is due, at that moment. Uses a thread, since the runtime's timer has a
/// resolution of a millisecond. Returns the due times of requests for which no queue had room.
fn pace(schedule: Schedule, queues: &[mpsc::Sender<Instant>]) -> Vec<Instant> {
    // Without this the kernel may wake the thread 50 microseconds late. Late wake-ups only worsen the result.
    let _finer = rustix::thread::set_current_timer_slack(NonZeroU64::new(1));
    let mut missed = Vec::new();
    for (number, queue) in (0..schedule.count).zip(queues.iter().cycle()) {
        let due = schedule.due(number);
        if let Some(early) = due.checked_duration_since(Instant::now()) {
            std::thread::sleep(early);
        }
        if queue.try_send(due).is_err() {
            missed.push(due);
        }
    }
    missed
}

async fn connection(
    tunnel: Tunnel,
    mut queue: mpsc::Receiver<Instant>,
    give_up: Instant,
) -> anyhow::Result<(Vec<Duration>, usize)> {
    let (mut answers, mut questions) = tokio::io::split(tunnel);
    let (asked, mut pending) = mpsc::channel(DUE_MAX);
    let write = async move {
        for number in 0.. {
            let Some(due) = queue.recv().await else { break };
            asked.send(due).await?;
            questions.write_all(&message(number)).await?;
        }
        anyhow::Ok(())
    };
    // Answers come in request order, so each answer belongs to the oldest pending request.
    let read = async move {
        let (mut samples, mut unanswered) = (Vec::with_capacity(4096), 0);
        let mut answer = [0; MESSAGE_BYTES];
        while let Some(due) = pending.recv().await {
            let read = answers.read_exact(&mut answer);
            match tokio::time::timeout_at(give_up.into(), read).await {
                Ok(read) => {
                    read?;
                    let wanted = message(samples.len() as u64);
                    ensure!(answer == wanted, "the answer is to another question");
                }
                Err(_elapsed) => unanswered += 1,
            }
            samples.push(due.elapsed());
        }
        Ok((samples, unanswered))
    };
    // Both on one task: after the writer ends, the reader still waits for pending answers.
    tokio::join!(write, read).1
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn requests_are_spread_evenly_and_without_drift() {
        let schedule = Schedule::new(3000, Duration::from_secs(2));
        assert_eq!(schedule.count, 6000);
        let third = schedule.due(1).duration_since(schedule.start);
        assert_eq!(third, Duration::from_nanos(333_333));
        let last = schedule.due(5999).duration_since(schedule.start);
        assert_eq!(last, Duration::from_secs(1) * 5999 / 3000);
        assert_eq!(
            schedule.end().duration_since(schedule.start),
            Duration::from_secs(2)
        );
    }

    #[test]
    fn request_to_a_full_queue_counts_as_missed() {
        let (due, mut queue) = mpsc::channel(1);
        let schedule = Schedule {
            start: Instant::now(),
            count: 3,
            rate: 1_000_000,
        };
        let missed = pace(schedule, &[due]);
        assert_eq!(missed, [schedule.due(1), schedule.due(2)]);
        assert_eq!(queue.try_recv().unwrap(), schedule.due(0));
    }
}
