//! Destinations that `--client-allow-target` allows, for all clients or per certificate.

use adit::demo::grpc_client::GrpcTunnel;

use super::processes::Processes;
use crate::support::clients::Kind;
use crate::support::process::{json_lines, scrape};
use crate::support::raw::Connection;
use crate::support::wait::{until, within};
use crate::support::world::{World, sample};
use crate::support::{connect, targets, tls};

const FLAG: &str = "--client-allow-target of the server";
const DENIED: &str = "adit_dial_failures_total{reason=\"denied\"}";
const UPSTREAM: &str = "konnectivity_network_proxy_server_dial_failure_count{reason=\"denied\"}";

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn clients_reach_allowed_targets_and_denials_name_the_flag() {
    let (port, _target) = targets::echo().await;
    let rules = [
        format!("--client-allow-target=127.0.0.1:{port}"),
        format!("--client-allow-target=LocalHost:{port}"),
    ];
    // The agent itself allows every target.
    let (world, _agent) = World::linked(&[&rules[0], &rules[1]], &[]).await;
    for target in ["127.0.0.1", "[::ffff:127.0.0.1]", "LOCALHOST."] {
        world.assert_serves(&format!("{target}:{port}")).await;
    }
    let denied = [
        format!("127.0.0.2:{port}"),
        format!("127.1:{port}"),
        "127.0.0.1:1".to_owned(),
        "169.254.169.254:80".to_owned(),
        "127.0.0.1".to_owned(),
    ];
    for target in &denied {
        let (status, body) = connect::refused(&world.connect(), &connect::head(target)).await;
        // The HTTP-CONNECT frontend follows Go's request parser, which requires a port.
        if target.contains(':') {
            assert_eq!(status, 403, "{target}: {body}");
            assert!(
                body.contains(target) && body.contains(FLAG),
                "{target}: {body}"
            );
        }
        let dial = within("an answer", GrpcTunnel::open(world.channel().await, target)).await;
        let error = dial.err().expect("it is denied").to_string();
        assert!(
            error.contains(target) && error.contains(FLAG),
            "{target}: {error}"
        );
    }
    let text = world.server().metrics.scrape().text();
    let count = sample(&text, DENIED);
    assert!(count >= Some(9.0), "{count:?}");
    assert_eq!(sample(&text, UPSTREAM), count);
}

/// The response head for a client with this certificate.
async fn ask(world: &World, client: &str, target: &str) -> String {
    let at = world.server().frontends[1];
    let dialed = tls::dial_to(world, b"http/1.1", at, Some(client)).await;
    let mut stream = dialed.expect("a handshake");
    connect::say(&mut stream, &connect::head(target)).await;
    connect::read_head(&mut stream).await
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_rule_with_a_common_name_applies_to_that_certificate_only() {
    let (port, _target) = targets::echo().await;
    let (other, _other) = targets::echo().await;
    let rules = [
        format!("--client-allow-target=cn=client,127.0.0.1:{port}"),
        format!("--client-allow-target=127.0.0.1:{other}"),
    ];
    let own = [&*rules[0], &rules[1], "--frontend=grpc=tcp:127.0.0.1:0"];
    let (world, _agent) = World::linked(&[&own[..], Kind::Tls.flags()].concat(), &[]).await;
    let (named, open) = (format!("127.0.0.1:{port}"), format!("127.0.0.1:{other}"));
    for (client, target, status) in [
        ("client", &named, "200"),
        ("client", &open, "200"),
        ("agent", &named, "403"),
        ("agent", &open, "200"),
    ] {
        let head = ask(&world, client, target).await;
        assert_eq!(
            head.split(' ').nth(1),
            Some(status),
            "{client} {target}: {head}"
        );
    }
    // A client on a unix socket has no certificate.
    let (status, body) = connect::refused(&world.connect(), &connect::head(&named)).await;
    assert_eq!(status, 403);
    assert!(body.contains("a client without a certificate"), "{body}");
    world.assert_serves(&open).await;

    for (client, error) in [("client", None), ("agent", Some("CN=agent"))] {
        let at = world.server().frontends[0];
        let stream = tls::dial_to(&world, b"h2", at, Some(client)).await;
        let connection = Connection::over(stream.expect("a handshake")).await;
        let mut call = connection.proxy().await;
        call.dial(1, &named);
        let answer = format!("{:?}", call.payload().await.expect("an answer"));
        match error {
            None => assert!(answer.contains("error: \"\""), "{answer}"),
            Some(text) => assert!(answer.contains(text) && answer.contains(FLAG), "{answer}"),
        }
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_denial_by_the_server_is_one_line_in_its_log() {
    let (processes, _agent) = Processes::linked(&["--client-allow-target=127.0.0.1"], &[]).await;
    let socket = processes.world.connect();
    let (status, body) = connect::refused(&socket, &connect::head("127.0.0.2:80")).await;
    assert_eq!(status, 403, "{body}");
    let failed = || {
        let log = processes.server.log();
        let lines = json_lines(&log);
        lines
            .filter(|line| line["target"] == "adit::dial")
            .collect::<Vec<_>>()
    };
    until("the line", || !failed().is_empty()).await;
    let lines = failed();
    let [line] = lines.as_slice() else {
        panic!("{lines:?}");
    };
    for (field, value) in [
        ("destination", "127.0.0.2:80"),
        ("reason", "denied"),
        ("stage", "server_policy"),
        ("error", body.trim_end()),
    ] {
        assert_eq!(line[field], value, "{line}");
    }
    assert!(line["agent"].is_null(), "no agent was asked: {line}");
    assert_eq!(sample(&scrape(processes.health).await, DENIED), Some(1.0));
}
