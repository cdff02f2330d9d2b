//! The access log: one event per tunnel at its end, or per dial that led to none, under a rate limit that reports suppressed events.

use std::time::{Duration, Instant};

use adit_core::text::beginning;
use prometheus::IntCounter;

use crate::labels::{
    ClientDialect, DialReason, DialStage, Driver, DriverReason, EndClass, Engine, Label as _,
    OpenedBy, Path,
};
use crate::rate::EventLimit;

/// Target of access events, for filters.
pub const TARGET: &str = "adit::access";
/// Burst of events, in seconds of the rate.
const BURST_SECONDS: u32 = 2;
/// Length limit of a peer's text in an event, in bytes: a destination may be 4 MiB long.
const SHOWN_BYTES_MAX: usize = 256;

/// Facts about one tunnel, or about a failed dial.
#[derive(Clone, Copy, Debug)]
pub struct TunnelRecord<'a> {
    /// The dialect the client spoke.
    pub client_dialect: ClientDialect,
    /// The agent that served it; empty if none did. On the path [`Path::Peer`] the server that has the agent.
    pub agent: &'a str,
    /// All agents that were asked, in order and separated by commas; `None` if only `agent` was asked.
    pub agents_asked: Option<&'a str>,
    /// host:port as the client asked for it. A peer's text: truncated and escaped here.
    pub destination: &'a str,
    /// From the dial's arrival to its answer.
    pub dial: Duration,
    /// What was opened.
    pub outcome: AccessOutcome,
    /// How the tunnel ended.
    pub end: EndClass,
    /// More about the end: the failed dial's reason, or which side cut the tunnel.
    pub detail: Option<&'static str>,
    /// The path of the tunnel, or of the failed dial's request; `None` if no agent was asked.
    pub path: Option<Path>,
    /// Which end asked for the tunnel.
    pub opened_by: OpenedBy,
    /// What the agent has proved, by its certificate or token.
    pub principal: Option<&'a str>,
    /// The server that forwards the dial, and what it says of its client.
    pub asked_by: Option<(&'a str, &'a str)>,
}

impl TunnelRecord<'_> {
    fn claimed_client(&self) -> Option<&str> {
        let (_server, client) = self.asked_by?;
        (!client.is_empty()).then(|| cut(client))
    }
}

/// What came of a dial.
#[derive(Clone, Copy, Debug)]
pub enum AccessOutcome {
    /// A tunnel, which has ended.
    Tunnel(TunnelFlow),
    /// No tunnel.
    Failed(DialReason, DialStage),
    /// No tunnel: the client gave up, or this process stopped.
    Cancelled,
}

/// The bytes of a tunnel, and what moved them.
#[derive(Clone, Copy, Debug)]
pub struct TunnelFlow {
    /// Payload bytes from client to target.
    pub bytes_to_target: u64,
    /// Payload bytes from target to client.
    pub bytes_to_client: u64,
    /// From the dial's answer to the end.
    pub life: Duration,
    /// What moved the bytes.
    pub engine: Engine,
    /// The I/O driver of the client's socket.
    pub driver: Driver,
    /// Why this driver was chosen.
    pub driver_reason: DriverReason,
}

/// Writes records as events, up to a limit per second. One per process, shared by reference.
#[derive(Debug)]
pub struct AccessLog {
    limit: EventLimit,
}

impl AccessLog {
    /// At most `per_second` events per second on average and twice as many at once; 0 means no limit. `suppressed_total` counts
    /// suppressed events (`access_events_suppressed` of [`AditMetrics`](crate::AditMetrics)).
    #[must_use]
    pub fn new(per_second: u32, suppressed_total: IntCounter) -> Self {
        let burst = per_second.saturating_mul(BURST_SECONDS);
        Self {
            limit: EventLimit::new(per_second, burst, suppressed_total),
        }
    }

    /// Writes `record`, or suppresses it above the rate limit; the next event reports the number of suppressed ones.
    pub fn record(&self, record: &TunnelRecord<'_>) {
        self.record_at(record, Instant::now());
    }

    fn record_at(&self, record: &TunnelRecord<'_>, now: Instant) {
        if !tracing::enabled!(target: TARGET, tracing::Level::INFO) {
            return;
        }
        if let Some(suppressed) = self.limit.admit_at(now) {
            emit(record, suppressed);
        }
    }
}

fn emit(record: &TunnelRecord<'_>, suppressed: u64) {
    let suppressed = (suppressed > 0).then_some(suppressed);
    let (agent, via) = agent_or_via(Some(record.agent), record.path);
    match &record.outcome {
        AccessOutcome::Tunnel(flow) => tracing::info!(
            target: TARGET,
            client_dialect = record.client_dialect.as_str(),
            agent = cut(agent.unwrap_or_default()),
            via = via.map(cut),
            agents_asked = record.agents_asked.map(cut),
            destination = cut(record.destination),
            bytes_to_target = flow.bytes_to_target,
            bytes_to_client = flow.bytes_to_client,
            dial_seconds = record.dial.as_secs_f64(),
            life_seconds = flow.life.as_secs_f64(),
            end = record.end.as_str(),
            detail = record.detail,
            engine = flow.engine.as_str(),
            driver = flow.driver.as_str(),
            driver_reason = flow.driver_reason.as_str(),
            path = record.path.map(|path| path.as_str()),
            opened_by = record.opened_by.as_str(),
            principal = record.principal.map(cut),
            asked_by = record.asked_by.map(|(server, _)| cut(server)),
            claimed_client = record.claimed_client(),
            suppressed,
            "tunnel ended"
        ),
        AccessOutcome::Failed(reason, stage) => {
            emit_dial(record, Some((*reason, *stage)), suppressed);
        }
        AccessOutcome::Cancelled => emit_dial(record, None, suppressed),
    }
}

/// The agent, or the server that has it and does not say which it is.
pub(super) fn agent_or_via(
    agent: Option<&str>,
    path: Option<Path>,
) -> (Option<&str>, Option<&str>) {
    match path {
        Some(Path::Peer) => (None, agent),
        _ => (agent, None),
    }
}

/// Without the fields of a tunnel.
fn emit_dial(
    record: &TunnelRecord<'_>,
    failure: Option<(DialReason, DialStage)>,
    suppressed: Option<u64>,
) {
    let (agent, via) = agent_or_via(Some(record.agent), record.path);
    tracing::info!(
        target: TARGET,
        client_dialect = record.client_dialect.as_str(),
        agent = cut(agent.unwrap_or_default()),
        via = via.map(cut),
        agents_asked = record.agents_asked.map(cut),
        destination = cut(record.destination),
        dial_seconds = record.dial.as_secs_f64(),
        reason = failure.map(|(reason, _)| reason.as_str()),
        stage = failure.map(|(_, stage)| stage.as_str()),
        end = record.end.as_str(),
        detail = record.detail,
        path = record.path.map(|path| path.as_str()),
        opened_by = record.opened_by.as_str(),
        principal = record.principal.map(cut),
        asked_by = record.asked_by.map(|(server, _)| cut(server)),
        claimed_client = record.claimed_client(),
        suppressed,
        "{}",
        if failure.is_some() { "dial failed" } else { "dial cancelled" }
    );
}

/// The first 256 bytes at most, cut between characters: how events show a peer's text.
#[must_use]
pub fn cut(text: &str) -> &str {
    beginning(text, SHOWN_BYTES_MAX)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::log::tests::logged;
    use adit_config::plan::LogFormat;

    use crate::log::LogOptions;

    fn log(per_second: u32) -> AccessLog {
        AccessLog::new(per_second, IntCounter::new("c", "c").unwrap())
    }

    fn record(destination: &str) -> TunnelRecord<'_> {
        TunnelRecord {
            client_dialect: ClientDialect::HttpConnect,
            agent: "agent-1",
            agents_asked: None,
            destination,
            dial: Duration::from_millis(250),
            outcome: AccessOutcome::Tunnel(TunnelFlow {
                bytes_to_target: 7,
                bytes_to_client: 4_000_000_000_000,
                life: Duration::from_secs(2),
                engine: Engine::Copy,
                driver: Driver::Task,
                driver_reason: DriverReason::Framed,
            }),
            end: EndClass::LinkLost,
            detail: None,
            path: Some(Path::Lane),
            opened_by: OpenedBy::Client,
            principal: None,
            asked_by: None,
        }
    }

    fn json() -> LogOptions {
        LogOptions {
            format: LogFormat::Json,
            ..LogOptions::default()
        }
    }

    #[test]
    fn event_holds_every_field_of_the_record() {
        let text = logged(&json(), || log(1).record(&record("10.0.0.1:443")));
        let event: serde_json::Value = serde_json::from_str(&text).unwrap();
        assert_eq!(event["target"], TARGET);
        assert_eq!(event["client_dialect"], "http-connect");
        assert_eq!(event["agent"], "agent-1");
        assert_eq!(event["destination"], "10.0.0.1:443");
        assert_eq!(event["bytes_to_target"], 7);
        assert_eq!(event["bytes_to_client"], 4_000_000_000_000_u64);
        assert_eq!(event["dial_seconds"], 0.25);
        assert_eq!(event["life_seconds"], 2.0);
        assert_eq!(event["end"], "link_lost");
        assert_eq!(event["engine"], "copy");
        assert_eq!(event["driver"], "task");
        assert_eq!(event["driver_reason"], "framed");
        assert_eq!(event["opened_by"], "client");
        assert!(
            [
                "suppressed",
                "detail",
                "principal",
                "agents_asked",
                "via",
                "asked_by",
                "claimed_client"
            ]
            .iter()
            .all(|absent| event.get(absent).is_none()),
            "{text}"
        );
    }

    #[test]
    fn event_of_a_failed_dial_has_its_reason_and_nothing_of_a_tunnel() {
        let events = |outcome| {
            let record = TunnelRecord {
                outcome,
                end: EndClass::Other,
                ..record("10.0.0.1:443")
            };
            let text = logged(&json(), || log(1).record(&record));
            serde_json::from_str::<serde_json::Value>(&text).unwrap()
        };
        let failed = events(AccessOutcome::Failed(
            DialReason::Refused,
            DialStage::Connect,
        ));
        assert_eq!(failed["target"], TARGET);
        assert_eq!(failed["message"], "dial failed");
        assert_eq!(
            (&failed["reason"], &failed["stage"]),
            (&"refused".into(), &"connect".into())
        );
        let cancelled = events(AccessOutcome::Cancelled);
        assert_eq!(cancelled["message"], "dial cancelled");
        assert_eq!(cancelled.get("reason"), None);
        let of_tunnels = [
            "engine",
            "driver",
            "driver_reason",
            "life_seconds",
            "bytes_to_target",
        ];
        for event in [failed, cancelled] {
            assert!(
                of_tunnels.iter().all(|field| event.get(field).is_none()),
                "{event}"
            );
        }
    }

    /// Limit (operations): Access events | `--access-log-limit`, by default 100 per second, 200 at once
    #[test]
    fn event_after_a_flood_has_the_suppressed_count() {
        let log = log(1);
        let start = Instant::now();
        let text = logged(&json(), || {
            (0..10).for_each(|_| log.record_at(&record("a:1"), start));
            log.record_at(&record("a:1"), start + Duration::from_secs(1));
        });
        let events: Vec<serde_json::Value> = text
            .lines()
            .map(|line| serde_json::from_str(line).unwrap())
            .collect();
        assert_eq!(events.len(), 3, "{text}");
        assert_eq!(events[2]["suppressed"], 8);
    }

    #[test]
    fn hostile_destination_stays_one_short_line() {
        let destination = format!("x\n\u{1b}[2Jfake end=\"clean\" {}", "ä".repeat(3_000));
        let text = logged(&LogOptions::default(), || {
            log(1).record(&record(&destination))
        });
        assert_eq!(text.lines().count(), 1, "{text}");
        assert!(text.len() < 1_024 && !text.contains('\u{1b}'), "{text}");
        assert!(text.contains("\\\"clean\\\""), "{text}");
    }

    #[test]
    fn nothing_is_counted_when_access_events_are_filtered_out() {
        let suppressed = IntCounter::new("c", "c").unwrap();
        let log = AccessLog::new(1, suppressed.clone());
        let options = LogOptions {
            filter: Some("warn".to_owned()),
            ..LogOptions::default()
        };
        let text = logged(&options, || {
            (0..10).for_each(|_| log.record(&record("a:1")))
        });
        assert_eq!((text.as_str(), suppressed.get()), ("", 0));
    }
}
