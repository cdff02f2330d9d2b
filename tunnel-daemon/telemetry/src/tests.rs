//! Tests of scrapes of fresh and used metric sets, compared with the metrics that upstream's programs export.

pub(crate) mod declared;
mod reference;

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use adit_core::failure::DialFailure;
use adit_core::wire::packets::PacketType;

use crate::labels::{
    AccountRole, ClientDialect, DialCap, Driver, EndClass, EndpointDialFailure, LinkDirection,
    LinkEnding, Offence, Path, PeerKind, ReloadResult, Segment, ServiceMethod,
};
use crate::{AgentMetrics, DialCounts, Scrape, ServerMetrics, TunnelFacts, TunnelSide};

const SERVER: &str = "konnectivity_network_proxy_server_";
const AGENT: &str = "konnectivity_network_proxy_agent_";

/// Samples by series and types by family, the data that upstream's test harness extracts.
fn parse(scrape: &Scrape) -> (BTreeMap<String, f64>, BTreeMap<String, String>) {
    let mut samples = BTreeMap::new();
    let mut types = BTreeMap::new();
    for line in scrape.text().lines() {
        if let Some(family) = line.strip_prefix("# TYPE ") {
            let (name, kind) = family.split_once(' ').unwrap();
            let earlier = types.insert(name.to_owned(), kind.to_owned());
            assert!(earlier.is_none(), "{name} twice");
        } else if !line.starts_with("# HELP ") {
            let (series, value) = line.rsplit_once(' ').unwrap();
            let earlier = samples.insert(series.to_owned(), value.parse().unwrap());
            assert!(earlier.is_none(), "{series} twice");
        }
    }
    (samples, types)
}

fn sample(scrape: &Scrape, series: &str) -> Option<f64> {
    parse(scrape).0.get(series).copied()
}

/// Asserts that each of upstream's series has this value at the server.
#[track_caller]
fn at_server<const N: usize>(metrics: &ServerMetrics, expected: Option<f64>, series: [&str; N]) {
    for series in series {
        let value = sample(&metrics.scrape(), &format!("{SERVER}{series}"));
        assert_eq!(value, expected, "{series}");
    }
}

fn agent_sample(metrics: &AgentMetrics, series: &str) -> Option<f64> {
    sample(&metrics.scrape(), &format!("{AGENT}{series}"))
}

/// Asserts that exactly these series with the prefix exist, each with the value 0.
#[track_caller]
fn only_zero_series<const N: usize>(scrape: &Scrape, prefix: &str, expected: [&str; N]) {
    let samples = parse(scrape).0;
    let of_prefix = samples.iter().filter(|(name, _)| name.starts_with(prefix));
    let found: Vec<(String, f64)> = of_prefix.map(|(name, at)| (name.clone(), *at)).collect();
    assert_eq!(found, expected.map(|name| (format!("{prefix}{name}"), 0.0)));
}

/// Upper bounds of a family's buckets, in order and as written.
fn bounds(scrape: &Scrape, family: &str) -> Vec<String> {
    let prefix = format!("{family}_bucket{{");
    let text = scrape.text();
    let bound = |line: &str| {
        let (_, bound) = line.strip_prefix(&prefix)?.split_once("le=\"")?;
        Some(bound.split_once('"')?.0.to_owned())
    };
    text.lines().filter_map(bound).collect()
}

fn used_server() -> ServerMetrics {
    let metrics = ServerMetrics::new(&["destHost", "default"]);
    metrics
        .packets(Segment::FromClient)
        .count(PacketType::DialReq);
    metrics.packets(Segment::FromAgent).count(999);
    metrics.stream_error(
        Segment::ToClient,
        tonic::Code::Cancelled,
        Some(PacketType::Data.into()),
    );
    metrics.stream_error(Segment::FromAgent, tonic::Code::Unavailable, None);
    metrics.dial_failures.count(&DialFailure::NoAgent);
    metrics.dial_succeeded(Duration::from_millis(3));
    metrics.frontend_write.observe(Duration::from_micros(5));
    drop(metrics.open_tunnel());
    drop(metrics.pending_backend_dials.used().guard());
    drop(metrics.grpc_connections.of(ServiceMethod::Proxy).guard());
    drop(
        metrics
            .full_receive_channels
            .of(ServiceMethod::Connect)
            .guard(),
    );
    metrics
}

#[test]
fn fresh_server_shows_exactly_the_zero_series_of_upstream() {
    let scrape = ServerMetrics::new(&["destHost", "default"]).scrape();
    let expected = [
        "culled_leases_count",
        "http_connections",
        "ready_backend_connections",
        "ready_backends{proxy_strategy=\"default\"}",
        "ready_backends{proxy_strategy=\"destHost\"}",
    ];
    only_zero_series(&scrape, SERVER, expected);
}

#[test]
fn fresh_agent_shows_exactly_the_zero_series_of_upstream() {
    let expected = [
        "known_server_count",
        "open_endpoint_connections",
        "open_server_connections",
    ];
    only_zero_series(&AgentMetrics::new().scrape(), AGENT, expected);
}

#[test]
fn used_server_exports_upstreams_families_with_their_types() {
    let (_, types) = parse(&used_server().scrape());
    let ours: BTreeSet<(&str, &str)> = types
        .iter()
        .filter_map(|(name, kind)| Some((name.strip_prefix(SERVER)?, kind.as_str())))
        .collect();
    let expected = [
        ("connection_duration_seconds", "histogram"),
        ("culled_leases_count", "counter"),
        ("dial_duration_seconds", "histogram"),
        ("dial_failure_count", "counter"),
        ("established_connections", "gauge"),
        ("frontend_write_duration_seconds", "histogram"),
        ("full_receive_channels", "gauge"),
        ("grpc_connections", "gauge"),
        ("http_connections", "gauge"),
        ("pending_backend_dials", "gauge"),
        ("ready_backend_connections", "gauge"),
        ("ready_backends", "gauge"),
        ("stream_errors_total", "counter"),
        ("stream_packets_total", "counter"),
    ];
    assert_eq!(ours, BTreeSet::from(expected));
}

/// Upstream (configuration): The gauge of open tunnels follows, and the duration histogram gets one sample per tunnel.
#[test]
fn server_series_are_spelled_as_upstream_spells_them() {
    let metrics = used_server();
    let ones = [
        "stream_packets_total{packet_type=\"DIAL_REQ\",segment=\"from_client\"}",
        "stream_packets_total{packet_type=\"999\",segment=\"from_agent\"}",
        "stream_errors_total{code=\"Canceled\",packet_type=\"DATA\",segment=\"to_client\"}",
        "stream_errors_total{code=\"Unavailable\",packet_type=\"Unknown\",segment=\"from_agent\"}",
        "dial_failure_count{reason=\"no_agent\"}",
        "dial_duration_seconds_count",
        "connection_duration_seconds_count",
        "frontend_write_duration_seconds_bucket{le=\"1e-05\"}",
    ];
    at_server(&metrics, Some(1.0), ones);
    let zeroes = [
        "established_connections",
        "pending_backend_dials",
        "grpc_connections{service_method=\"Proxy\"}",
        "full_receive_channels{service_method=\"Connect\"}",
        "frontend_write_duration_seconds_bucket{le=\"1e-06\"}",
    ];
    at_server(&metrics, Some(0.0), zeroes);
    let connect = ["grpc_connections{service_method=\"Connect\"}"];
    at_server(&metrics, None, connect);
}

#[test]
fn buckets_are_upstreams() {
    let server = used_server().scrape();
    let latency = [
        "1e-06", "1e-05", "0.0001", "0.005", "0.025", "0.1", "0.5", "2.5", "12.5", "+Inf",
    ];
    let of = |family: &str| bounds(&server, &format!("{SERVER}{family}_duration_seconds"));
    assert_eq!(of("dial"), latency);
    assert_eq!(of("frontend_write"), latency);
    let life = [
        "1", "5", "15", "30", "60", "300", "900", "1800", "3600", "14400", "43200", "86400", "+Inf",
    ];
    assert_eq!(of("connection"), life);
    let agent = AgentMetrics::new();
    agent.dial_succeeded(Duration::from_millis(1));
    let dial = ["0.005", "0.025", "0.1", "0.5", "2.5", "10", "30", "+Inf"];
    let of_agent = bounds(&agent.scrape(), &format!("{AGENT}dial_duration_seconds"));
    assert_eq!(of_agent, dial);
}

/// Upstream's bounds jump from 0.1 ms to 5 ms at the server, and begin at 5 ms at the agent.
#[test]
fn dial_latency_is_resolved_from_a_tenth_of_a_millisecond_to_a_second_at_both_ends() {
    let (server, agent) = (ServerMetrics::new(&["default"]), AgentMetrics::new());
    server.dial_succeeded(Duration::from_micros(300));
    agent.dial_succeeded(Duration::from_micros(300));
    for scrape in [server.scrape(), agent.scrape()] {
        let between: Vec<String> = bounds(&scrape, "adit_dial_seconds")
            .into_iter()
            .filter(|bound| bound.parse::<f64>().is_ok_and(|bound| bound <= 1.0))
            .collect();
        let expected = [
            "0.0001", "0.00025", "0.0005", "0.001", "0.0025", "0.005", "0.01", "0.025", "0.05",
            "0.1", "0.25", "0.5", "1",
        ];
        assert_eq!(between, expected);
        let text = scrape.text();
        for (bound, count) in [("0.00025", 0), ("0.0005", 1)] {
            let line = format!("adit_dial_seconds_bucket{{le=\"{bound}\"}} {count}");
            assert!(text.lines().any(|shown| shown == line), "{line} in {text}");
        }
    }
}

#[test]
fn used_agent_exports_upstreams_series_and_compared_help_texts() {
    let metrics = AgentMetrics::new();
    metrics
        .packets(Segment::ToAgent)
        .count(PacketType::CloseRsp);
    metrics.stream_error(Segment::FromAgent, tonic::Code::Internal, None);
    metrics
        .endpoint_dial_failures
        .count(EndpointDialFailure::Timeout);
    metrics
        .server_connection_failures
        .count(LinkDirection::FromServer);
    metrics.open_server_connections.set(2);
    metrics.known_server_count.set(3);
    let open = metrics.open_endpoint_connections.guard();
    let expected = [
        (
            "stream_packets_total{packet_type=\"CLOSE_RSP\",segment=\"to_agent\"}",
            1.0,
        ),
        (
            "stream_errors_total{code=\"Internal\",packet_type=\"Unknown\",segment=\"from_agent\"}",
            1.0,
        ),
        ("endpoint_dial_failure_total{reason=\"timeout\"}", 1.0),
        (
            "server_connection_failure_count{direction=\"from_server\"}",
            1.0,
        ),
        ("open_server_connections", 2.0),
        ("known_server_count", 3.0),
        ("open_endpoint_connections", 1.0),
    ];
    for (series, value) in expected {
        assert_eq!(agent_sample(&metrics, series), Some(value), "{series}");
    }
    drop(open);
    let left = agent_sample(&metrics, "open_endpoint_connections");
    assert_eq!(left, Some(0.0));
    let text = metrics.scrape().text();
    let helps = [
        "endpoint_dial_failure_total Number of failures dialing the remote endpoint, by reason (example: timeout).",
        "open_endpoint_connections Current number of open endpoint connections.",
    ];
    for help in helps {
        let line = format!("\n# HELP {AGENT}{help}\n");
        assert!(text.contains(&line), "{help}");
    }
}

#[test]
fn process_metrics_are_exported() {
    let (samples, types) = parse(&AgentMetrics::new().scrape());
    assert!(samples["process_resident_memory_bytes"] > 0.0 && samples["process_open_fds"] > 0.0);
    assert!(
        samples["process_cpu_seconds_total"].fract() > 0.0,
        "finer than a second"
    );
    assert_eq!(types["process_cpu_seconds_total"], "counter");
    assert_eq!(types["process_start_time_seconds"], "gauge");
}

#[tokio::test]
async fn tasks_are_counted_wherever_they_are_scraped() {
    let metrics = AgentMetrics::new();
    // Health and admin ports are served on a thread of their own.
    let tasks = || {
        let scrape = metrics.scrape();
        let scraped = std::thread::spawn(move || parse(&scrape).0["adit_tasks"]);
        scraped.join().unwrap()
    };
    let before = tasks();
    let mut pending = tokio::task::JoinSet::new();
    pending.spawn(std::future::pending::<()>());
    assert_eq!(tasks(), before + 1.0);
    pending.shutdown().await;
    assert_eq!(tasks(), before);
}

#[test]
fn own_families_start_at_zero_and_count() {
    let metrics = ServerMetrics::new(&[]);
    let read = |series: &str| sample(&metrics.scrape(), series);
    let violations = "adit_tunnels_closed_total{reason=\"credit_violation\"}";
    assert_eq!(read(violations), Some(0.0));
    assert_eq!(read("adit_links{peer=\"go\"}"), Some(0.0));
    let adit = metrics.adit();
    adit.insecure_flag("insecure-allow-unauthenticated-agents");
    adit.tunnels_closed.count(EndClass::Stalled);
    let table = adit.open_tunnels();
    let facts = TunnelFacts {
        side: TunnelSide::Client(ClientDialect::Grpc),
        peer: "agent",
        principal: None,
        link: 1,
        destination: "a:1",
        path: Path::Link,
    };
    let (tunnel, node) = (table.enter(&facts), table.enter_node(&facts));
    tunnel.live().moved(0, 1_000);
    node.live().moved(3, 0);
    adit.offences.count(Offence::DataWithoutConn);
    let dials = DialCounts {
        retries: 3,
        hedges: 4,
        failovers: 5,
        lost: 8,
        waited: 6,
        suspicions: 7,
    };
    let before = DialCounts {
        retries: 2,
        ..DialCounts::default()
    };
    adit.dials(&before, &dials);
    adit.late_dial_answers.inc();
    adit.dials_refused.count(DialCap::PerAgent);
    adit.tls_reloads.count(ReloadResult::Failed);
    adit.links_ended.count(LinkEnding::ControlQueue);
    let link = adit.links.of(PeerKind::Adit).guard();
    let expected = [
        (
            "adit_insecure_flags{flag=\"insecure-allow-unauthenticated-agents\"}",
            1.0,
        ),
        ("adit_tunnels_closed_total{reason=\"stalled\"}", 1.0),
        ("adit_tunnel_bytes_total{direction=\"to_client\"}", 1_000.0),
        ("adit_node_tunnel_bytes_total{direction=\"to_target\"}", 3.0),
        (
            "adit_protocol_offences_total{kind=\"data_without_conn\"}",
            1.0,
        ),
        ("adit_dial_retries_total{reason=\"not_sent\"}", 1.0),
        ("adit_dial_retries_total{reason=\"slow\"}", 4.0),
        ("adit_dial_retries_total{reason=\"silent\"}", 5.0),
        ("adit_dial_retries_total{reason=\"lost\"}", 8.0),
        ("adit_dials_waited_total", 6.0),
        ("adit_link_suspicions_total", 7.0),
        ("adit_late_dial_answers_total", 1.0),
        ("adit_dials_refused_total{cap=\"per_agent\"}", 1.0),
        ("adit_tls_reloads_total{result=\"failed\"}", 1.0),
        ("adit_links_ended_total{reason=\"control_queue\"}", 1.0),
        ("adit_links{peer=\"adit\"}", 1.0),
    ];
    for (series, value) in expected {
        assert_eq!(read(series), Some(value), "{series}");
    }
    drop(link);
    assert_eq!(read("adit_links{peer=\"adit\"}"), Some(0.0));
}

/// Failures are counters since the start of the relay; open tunnels are a gauge with the relay's driver.
#[test]
fn relay_counts_are_exported_unchanged() {
    let metrics = ServerMetrics::new(&[]);
    let read = || {
        [
            "tunnels{driver=\"epoll\"}",
            "thread_panics_total",
            "driver_failures_total",
        ]
        .map(|family| sample(&metrics.scrape(), &format!("adit_relay_{family}")))
    };
    assert_eq!(read(), [None, Some(0.0), Some(0.0)]);
    for (tunnels, counts) in [(3, [1, 2]), (3, [1, 2]), (2, [1, 4])] {
        metrics.adit().relay(Driver::Epoll, tunnels, counts);
        let [panics, failures] = counts.map(|count| count as f64);
        let told = [tunnels as f64, panics, failures];
        assert_eq!(read(), told.map(Some));
    }
}

/// Limit (accounting): Round-trip time of open connections, links and lanes | their mean; no series while none was
/// measured
#[test]
fn open_rtt_series_exist_only_while_connections_are_measured() {
    let metrics = ServerMetrics::new(&[]);
    let labels = "{agent=\"a\",destination_class=\"\",role=\"link\",tenant=\"default\"}";
    let read = |family: &str| sample(&metrics.scrape(), &format!("adit_ebpf_{family}{labels}"));
    let account = metrics.adit().account();
    let link = account.series(AccountRole::Link, "a", "");
    let other = account.series(AccountRole::Link, "b", "").open_rtt(4.0);
    assert_eq!(read("open_rtt_seconds"), None);
    for _time in 0..2 {
        let open = link.open_rtt(0.25);
        assert_eq!(read("open_rtt_seconds"), Some(0.25));
        open.set(0.5);
        assert_eq!(read("open_rtt_seconds"), Some(0.5));
        drop(open);
        assert_eq!(read("open_rtt_seconds"), None);
    }
    // The histogram counts ended connections only.
    assert_eq!(read("rtt_seconds_count"), Some(0.0));
    let (_, types) = parse(&metrics.scrape());
    assert_eq!(types["adit_ebpf_open_rtt_seconds"], "gauge");
    drop(other);
    let (_, types) = parse(&metrics.scrape());
    assert!(!types.contains_key("adit_ebpf_open_rtt_seconds"));
}

/// Upstream (configuration): The gauge of open tunnels follows, and the duration histogram gets one sample per tunnel.
#[tokio::test]
async fn cancelled_tunnel_leaves_its_gauges_and_is_counted_as_ended() {
    let metrics = ServerMetrics::new(&[]);
    let tunnel = {
        let metrics = metrics.clone();
        async move {
            let _open = metrics.open_tunnel();
            let _dial = metrics.pending_backend_dials.used().guard();
            let _http = metrics.http_connections.guard();
            let mut held = metrics.adit().held_bytes.share();
            held.set(700);
            held.set(500);
            std::future::pending::<()>().await;
        }
    };
    let mut tunnel = Box::pin(tunnel);
    let over = tokio::time::timeout(Duration::ZERO, &mut tunnel).await;
    assert!(over.is_err());
    let gauges = [
        "established_connections",
        "pending_backend_dials",
        "http_connections",
    ];
    at_server(&metrics, Some(1.0), gauges);
    assert_eq!(sample(&metrics.scrape(), "adit_held_bytes"), Some(500.0));
    let ended = ["connection_duration_seconds_count"];
    at_server(&metrics, None, ended);
    drop(tunnel);
    at_server(&metrics, Some(0.0), gauges);
    assert_eq!(sample(&metrics.scrape(), "adit_held_bytes"), Some(0.0));
    at_server(&metrics, Some(1.0), ended);
}

#[test]
fn two_metric_sets_share_nothing() {
    let [one, other] = [(); 2].map(|()| ServerMetrics::new(&["default"]));
    one.set_ready_backends("default", 4);
    one.ready_backend_connections.set(4);
    let ready = "ready_backends{proxy_strategy=\"default\"}";
    at_server(&one, Some(4.0), [ready, "ready_backend_connections"]);
    at_server(&other, Some(0.0), [ready]);
}
