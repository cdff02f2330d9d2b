//! Failed dials: one log line at each end that saw the failure, and one series per reason.

use adit::demo::grpc_client::GrpcTunnel;
use serde_json::Value;

use super::processes::Processes;
use crate::support::process::{Process, access_events, at_least, json_lines, metric, scrape, sum};
use crate::support::raw::Connection;
use crate::support::targets::closed_port;
use crate::support::wait::until;
use crate::support::world::World;
use crate::support::{connect, world};

const FAMILY: &str = "adit_dial_failures_total";

/// The `dial failed` lines of a log: destination, reason, stage, agent, path.
fn failed(log: &str) -> Vec<[String; 5]> {
    let lines = json_lines(log);
    let failed = lines.filter(|line| line["target"] == "adit::dial");
    let fields = ["destination", "reason", "stage", "agent", "path"];
    failed
        .map(|line| {
            assert_eq!(line["level"], "WARN", "{line}");
            assert!(line["error"].is_string(), "{line}");
            fields.map(|field| line[field].as_str().unwrap_or_default().to_owned())
        })
        .collect()
}

/// Waits until a log has `count` such lines.
async fn failures(process: &Process, count: usize) -> Vec<[String; 5]> {
    until("lines of failed dials", || {
        failed(&process.log()).len() >= count
    })
    .await;
    failed(&process.log())
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_failed_dial_is_one_line_at_its_server_and_one_at_its_agent() {
    for (lanes, path) in [
        ("--lanes-per-link=0", "link"),
        ("--lanes-per-link=4", "lane"),
    ] {
        let flags = [lanes, "--proxy-strategies=destHost", "--metrics-agents=1"];
        let processes = Processes::start(&flags).await;
        let (_held, closed) = closed_port();
        let (refused, denied) = (closed.to_string(), format!("127.0.0.2:{}", closed.port()));
        let nowhere = "198.51.100.1:443";
        let agent = processes.agent(
            "agent-1",
            &[
                "--allow-target=127.0.0.1/32",
                "--agent-identifiers=ipv4=127.0.0.1&ipv4=127.0.0.2",
            ],
        );
        let health = agent.address("health");
        processes.links(1.0).await;
        let dials = [&*refused, &*denied, nowhere];
        for target in dials {
            if path == "lane" {
                at_least(processes.health, "adit_lanes{state=\"idle\"}", 1.0).await;
            }
            let socket = processes.world.connect();
            connect::refused(&socket, &connect::head(target)).await;
        }
        let line = |line: [&str; 5]| line.map(str::to_owned);
        let of_both = vec![
            line([&refused, "refused", "connect", "agent-1", path]),
            line([&denied, "denied", "policy", "agent-1", path]),
        ];
        let of_server = [
            of_both.clone(),
            vec![line([nowhere, "no_agent", "route", "", ""])],
        ];
        assert_eq!(failures(&processes.server, 3).await, of_server.concat());
        // The access events say the same, and have nothing of a tunnel.
        until("access events", || {
            access_events(&processes.server.log()).len() >= 3
        })
        .await;
        let events = access_events(&processes.server.log());
        let reasons = events.iter().map(|event| event["reason"].as_str());
        assert_eq!(
            reasons.collect::<Vec<_>>(),
            ["refused", "denied", "no_agent"].map(Some)
        );
        for event in events {
            assert_eq!(event["message"], "dial failed");
            assert!(event["engine"].is_null() && event["driver"].is_null());
        }
        assert_eq!(failures(&agent, 2).await, of_both);
        // A denial names the flag, at both ends.
        for process in [&processes.server, &agent] {
            let log = process.log();
            assert!(
                log.contains("--allow-target of the agent: destination"),
                "{log}"
            );
        }
        let proved = |log: &str, agent: &str| {
            let lines = log.lines().filter(|line| line.contains("dial failed"));
            let lines = lines.map(|line| serde_json::from_str::<Value>(line).expect("JSON"));
            let of_agent = lines.filter(|line| line["agent"].as_str().unwrap_or_default() == agent);
            let principals = of_agent.map(|line| line["principal"].as_str().map(str::to_owned));
            principals.collect::<Vec<_>>()
        };
        let log = processes.server.log();
        for principal in proved(&log, "agent-1") {
            assert!(
                principal.is_some_and(|name| name.starts_with("CN=agent")),
                "{log}"
            );
        }
        let of_nobody = proved(&log, "");
        assert!(of_nobody.iter().all(Option::is_none), "{of_nobody:?}");
        let text = scrape(processes.health).await;
        let of = |result: &str| {
            let labels = format!("{{agent=\"agent-1\",result=\"{result}\"}}");
            world::sample(&text, &format!("adit_agent_dials_total{labels}"))
        };
        assert_eq!(of("failed"), Some(1.0), "{text}");
        // A refusal of the target is an answer of the agent, on a busy host a slow one.
        let answers = [of("answered"), of("slow")].map(Option::unwrap_or_default);
        assert_eq!(answers.iter().sum::<f64>(), 1.0, "{text}");
        for (health, failed) in [(processes.health, 3.0), (health, 2.0)] {
            let text = scrape(health).await;
            assert_eq!(sum(&text, FAMILY), failed, "{text}");
            for reason in ["refused", "denied"] {
                let series = format!("{FAMILY}{{reason=\"{reason}\"}}");
                assert_eq!(world::sample(&text, &series), Some(1.0), "{series}");
            }
        }
        let upstream =
            "konnectivity_network_proxy_agent_endpoint_dial_failure_total{reason=\"unknown\"}";
        metric(health, upstream, 2.0).await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_dial_that_loses_its_agent_counts_as_agent_lost() {
    let world = World::start(&[]).await;
    let (agent, mut link) = Connection::linked(&world, "silent", "").await;
    let channel = world.channel().await;
    let dial = GrpcTunnel::open(channel, "silent.test:1");
    let lose = async {
        link.payload().await;
        drop(agent);
    };
    let (outcome, ()) = tokio::join!(dial, lose);
    assert!(outcome.is_err());
    let series = format!("{FAMILY}{{reason=\"agent_lost\"}}");
    world.server_metric(&series, 1.0).await;
    let text = world.server().metrics.scrape().text();
    assert_eq!(sum(&text, FAMILY), 1.0);
}
