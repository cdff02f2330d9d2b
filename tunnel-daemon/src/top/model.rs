//! Rates: bytes that tunnels moved between two samples. Pure; the clock is an argument.

use std::cmp::Ordering;
use std::collections::HashMap;
use std::time::Instant;

use serde::Serialize;

use crate::status::model::{AgentStatus, CertificateStatus, Role, TunnelStatus, Tunnels};
use adit_config::TopSort;

/// One open tunnel and its rates. As JSON it has the fields of `GET /v1/tunnels` and the rates.
#[derive(Clone, PartialEq, Debug, Serialize)]
pub(super) struct Row {
    #[serde(flatten)]
    pub(super) tunnel: TunnelStatus,
    /// Bytes a second from client to target.
    #[serde(rename = "to_target_per_second")]
    pub(super) to_target: u64,
    /// Bytes a second from target to client.
    #[serde(rename = "to_client_per_second")]
    pub(super) to_client: u64,
}

impl Row {
    fn rate(&self) -> u64 {
        self.to_target.saturating_add(self.to_client)
    }

    pub(super) fn bytes(&self) -> u64 {
        let tunnel = &self.tunnel;
        tunnel
            .bytes_to_target
            .saturating_add(tunnel.bytes_to_client)
    }
}

/// One sample of the open tunnels.
#[derive(Clone, PartialEq, Debug, Serialize)]
pub(super) struct Sample {
    api: u32,
    pub(super) role: Role,
    pub(super) id: String,
    /// Number of open tunnels; exceeds the number of rows if the process has very many.
    pub(super) open: u64,
    #[serde(rename = "tunnels")]
    pub(super) rows: Vec<Row>,
    /// The agents with most failed and slow dials.
    #[serde(rename = "worst_agents")]
    pub(super) agents: Vec<AgentStatus>,
    pub(super) certificates: Vec<CertificateStatus>,
}

/// Remembers the previous sample.
#[derive(Default)]
pub(super) struct Sampler {
    before: Option<(Instant, u32)>,
    bytes: HashMap<u64, (u64, u64)>,
}

impl Sampler {
    /// Computes rates since the previous sample. The bytes of a tunnel that is new in this sample count from its opening.
    pub(super) fn take(&mut self, now: Tunnels, at: Instant) -> Sample {
        // Another process on the same path reuses tunnel ids. In containers it also has the same process id: there a tunnel
        // younger than the previous sample is new.
        let before = self.before.filter(|(_, pid)| *pid == now.pid);
        let since = before.map(|(before, _)| at.saturating_duration_since(before).as_secs_f64());
        let mut bytes = HashMap::with_capacity(now.tunnels.len());
        let rows = now.tunnels.into_iter().map(|tunnel| {
            let seen = (tunnel.bytes_to_target, tunnel.bytes_to_client);
            bytes.insert(tunnel.id, seen);
            let was_there = since.is_some_and(|since| tunnel.age_seconds >= since);
            let known = self.bytes.get(&tunnel.id).copied().filter(|_| was_there);
            let span = match (since, known) {
                (Some(since), Some(_)) => since,
                (since, None) => since.unwrap_or(f64::MAX).min(tunnel.age_seconds),
                (None, Some(_)) => tunnel.age_seconds,
            };
            let (target, client) = known.unwrap_or((0, 0));
            Row {
                to_target: per_second(seen.0.saturating_sub(target), span),
                to_client: per_second(seen.1.saturating_sub(client), span),
                tunnel,
            }
        });
        let rows = rows.collect();
        self.bytes = bytes;
        self.before = Some((at, now.pid));
        Sample {
            api: now.api,
            role: now.role,
            id: now.id,
            open: now.open,
            rows,
            agents: now.worst_agents,
            certificates: now.certificates,
        }
    }
}

fn per_second(bytes: u64, seconds: f64) -> u64 {
    // A younger tunnel has no meaningful rate.
    const SHORTEST: f64 = 0.01;
    #[expect(
        clippy::cast_possible_truncation,
        clippy::cast_sign_loss,
        clippy::cast_precision_loss,
        reason = "a rate for people: three digits are shown, and casts of floats saturate"
    )]
    let rate = (bytes as f64 / seconds.max(SHORTEST)) as u64;
    rate
}

/// Sorts rows; equal rows go by tunnel id, so that they keep their positions.
pub(super) fn sort(rows: &mut [Row], order: TopSort, reverse: bool) {
    rows.sort_by(|one, other| {
        let by_order = compare(one, other, order);
        let directed = if reverse {
            by_order.reverse()
        } else {
            by_order
        };
        directed.then_with(|| one.tunnel.id.cmp(&other.tunnel.id))
    });
}

fn compare(one: &Row, other: &Row, order: TopSort) -> Ordering {
    let (a, b) = (&one.tunnel, &other.tunnel);
    let by_rate = || other.rate().cmp(&one.rate());
    match order {
        TopSort::Rate => by_rate(),
        TopSort::Bytes => other.bytes().cmp(&one.bytes()),
        TopSort::Age => b.age_seconds.total_cmp(&a.age_seconds),
        TopSort::Agent => a.peer.cmp(&b.peer).then_with(by_rate),
        TopSort::Destination => a.destination.cmp(&b.destination).then_with(by_rate),
        TopSort::Rtt => b.rtt_micros.cmp(&a.rtt_micros),
        TopSort::Retransmits => b.retransmits.cmp(&a.retransmits),
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::super::tests::{tunnel, tunnels};
    use super::*;

    fn rates(sample: &Sample) -> Vec<(u64, u64)> {
        let rows = sample.rows.iter();
        rows.map(|row| (row.to_target, row.to_client)).collect()
    }

    #[test]
    fn a_rate_is_the_change_between_two_samples() {
        let (mut sampler, start) = (Sampler::default(), Instant::now());
        let first = sampler.take(tunnels(1, vec![tunnel(50, 500)]), start);
        assert_eq!(rates(&first), [(10, 20)], "since it opened, 50 s ago");
        let second = start + Duration::from_secs(2);
        let mut young = tunnel(2, 300);
        young.age_seconds = 1.0;
        let seen = sampler.take(tunnels(1, vec![tunnel(50, 700), young]), second);
        assert_eq!(rates(&seen), [(100, 200), (300, 600)]);
        let quiet = sampler.take(
            tunnels(1, vec![tunnel(50, 700)]),
            second + Duration::from_secs(1),
        );
        assert_eq!(rates(&quiet), [(0, 0)]);
    }

    #[test]
    fn rates_restart_with_another_process() {
        let (mut sampler, start) = (Sampler::default(), Instant::now());
        sampler.take(tunnels(1, vec![tunnel(50, 1000)]), start);
        let restarted = tunnels(2, vec![tunnel(50, 500)]);
        let seen = sampler.take(restarted, start + Duration::from_secs(1));
        assert_eq!(rates(&seen), [(10, 20)]);
    }

    /// A container's process is process 1 after each restart.
    #[test]
    fn rates_restart_after_a_restart_with_the_same_pid() {
        let (mut sampler, start) = (Sampler::default(), Instant::now());
        sampler.take(tunnels(1, vec![tunnel(50, 1_000_000)]), start);
        let mut young = tunnel(50, 500);
        young.age_seconds = 5.0;
        let seen = sampler.take(tunnels(1, vec![young]), start + Duration::from_secs(10));
        assert_eq!(rates(&seen), [(100, 200)]);
    }

    #[test]
    fn rows_come_in_each_order_and_its_reverse() {
        let mut sampler = Sampler::default();
        let rows = [(1, 300), (2, 900), (3, 100)].map(|(id, bytes)| tunnel(id, bytes));
        let mut rows = sampler.take(tunnels(1, rows.to_vec()), Instant::now()).rows;
        for (order, expected) in [
            (TopSort::Rate, [2, 1, 3]),
            (TopSort::Bytes, [2, 1, 3]),
            (TopSort::Age, [1, 2, 3]),
            (TopSort::Agent, [2, 1, 3]),
            (TopSort::Destination, [1, 2, 3]),
            (TopSort::Rtt, [3, 2, 1]),
            (TopSort::Retransmits, [2, 3, 1]),
        ] {
            let ids = |rows: &[Row]| rows.iter().map(|row| row.tunnel.id).collect::<Vec<_>>();
            sort(&mut rows, order, false);
            assert_eq!(ids(&rows), expected, "{order:?}");
            sort(&mut rows, order, true);
            let reversed: Vec<u64> = expected.into_iter().rev().collect();
            assert_eq!(ids(&rows), reversed, "{order:?} reversed");
        }
    }
}
