//! Byte counts of open tunnels, and of tunnels cut at shutdown.

use rustix::process::Signal;
use serde_json::Value;

use super::processes::Processes;
use crate::support::process::{access_events, at_least, json_lines, metric};
use crate::support::wait::until;
use crate::support::{connect, targets};

const TEXT: &[u8] = b"bytes that are counted before the tunnel ends";

fn stop_line(log: &str) -> Option<Value> {
    let mut lines = json_lines(log);
    lines.find(|line| line["message"] == "stopped")
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn bytes_of_an_open_tunnel_are_counted_and_logged_when_it_is_cut() {
    let (target, _echo) = targets::local_echo().await;
    let rows = [
        ("link", "--lanes-per-link=0", "--lane-security=tls"),
        ("lane", "--lanes-per-link=4", "--lane-security=tls"),
        (
            "raw-lane",
            "--lanes-per-link=4",
            "--lane-security=plaintext",
        ),
    ];
    for (path, lanes, security) in rows {
        let flags = [lanes, security, "--shutdown-grace=0s"];
        let (mut processes, agent) = Processes::linked(&flags, &[security]).await;
        let server = &mut processes.server;
        let agent_health = agent.address("health");
        if path != "link" {
            // A tunnel becomes a raw lane only if two other lanes stay idle.
            at_least(processes.health, "adit_lanes{state=\"idle\"}", 3.0).await;
        }
        let mut stream = connect::open(&processes.world.connect(), &target).await;
        connect::echo(&mut stream, TEXT).await;
        let bytes = f64::from(u32::try_from(TEXT.len()).expect("a few"));
        for health in [processes.health, agent_health] {
            for direction in ["to_target", "to_client"] {
                let series = format!("adit_tunnel_bytes_total{{direction=\"{direction}\"}}");
                metric(health, &series, bytes).await;
            }
        }
        server.signal(Signal::TERM);
        until("the access event", || {
            !access_events(&server.log()).is_empty()
        })
        .await;
        let events = access_events(&server.log());
        let [event] = &events[..] else {
            panic!("{path}: {events:?}");
        };
        assert_eq!(
            (&event["end"], &event["detail"], &event["path"]),
            (&"shutdown".into(), &"shutdown".into(), &path.into()),
            "{event}"
        );
        for field in ["bytes_to_target", "bytes_to_client"] {
            assert_eq!(event[field], TEXT.len(), "{path}: {event}");
        }
        until("the stop line", || stop_line(&server.log()).is_some()).await;
        let stopped = stop_line(&server.log()).expect("logged");
        assert_eq!(stopped["tunnels"], 1, "{path}: {stopped}");
        server.kill();
    }
}
