//! Files and ports that are broken, in use, or replaced at run time.

use std::fs;
use std::os::unix::fs::PermissionsExt as _;
use std::time::Duration;

use adit::{agent, server};
use adit_testkit::certificates::{ThrowawayCa, ThrowawayFiles, Usage};

use super::hostile_agents::turned_away;
use super::processes::Processes;
use crate::support::tls;
use crate::support::wait::{eventually, until, within};
use crate::support::world::{World, agent_plan, server_plan};

/// Why a server with this command line does not start.
async fn refused_server(args: &[String]) -> String {
    let started = server::start(&server_plan(args).expect("flags are right")).await;
    format!("{:#}", started.err().expect("it does not start"))
}

/// The same of an agent.
async fn refused_agent(args: &[String]) -> String {
    let started = agent::start(&agent_plan(args).expect("flags are right")).await;
    format!("{:#}", started.err().expect("it does not start"))
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn broken_certificate_files_stop_the_start_and_are_named() {
    let world = World::start(&[
        "--frontend=grpc=tcp:127.0.0.1:0",
        "--insecure-plaintext-frontend",
    ])
    .await;
    let good = |name: &str| fs::read_to_string(world.files.dir().join(name)).expect("a file");
    let another = ThrowawayCa::new("another").expect("a CA");
    let other_key = another
        .issue(Usage::Server, "other", &[])
        .expect("a pair")
        .key_pem;
    let truncated = good("server.crt");
    let broken = [
        ("server.crt", String::new()),
        ("server.crt", "not PEM at all".to_owned()),
        ("server.crt", truncated[..truncated.len() / 2].to_owned()),
        ("server.key", String::new()),
        ("server.key", good("server.crt")),
        ("server.key", other_key),
        (
            "ca.crt",
            "-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n".to_owned(),
        ),
    ];
    for (name, text) in broken {
        let path = world.files.dir().join(name);
        let before = good(name);
        fs::write(&path, &text).expect("writable");
        let line = refused_server(&world.other_args("0", "-second.sock")).await;
        fs::write(&path, before).expect("writable");
        assert!(
            line.contains(path.to_str().expect("text")),
            "{name}: {line}"
        );
        assert_eq!(line.lines().count(), 1, "{line}");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn missing_and_unreadable_files_are_named() {
    let world = World::start(&[]).await;
    let mut args = world.server_args("0");
    args.push("--cluster-ca-cert=/nowhere/ca.crt".to_owned());
    args.retain(|arg| !arg.starts_with("--cluster-ca-cert=/tmp"));
    let error = server_plan(&args).expect_err("no such file");
    assert!(error.contains("/nowhere/ca.crt"), "{error}");

    // A directory cannot be read as a file, not even by root.
    let folder = world.dir.path().join("folder");
    fs::create_dir(&folder).expect("writable");
    let flag = format!("--ca-cert={}", folder.display());
    let args = world.agent_args("a", 1, &["!--ca-cert", &flag]);
    let error = match agent_plan(&args) {
        Err(error) => error,
        Ok(plan) => format!("{:#}", agent::start(&plan).await.err().expect("no CA file")),
    };
    assert!(error.contains(folder.to_str().expect("text")), "{error}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn ports_and_sockets_in_use_are_named() {
    let world = World::start(&[]).await;
    let taken = world.server().agents.port().to_string();
    let line = refused_server(&world.other_args(&taken, "-second.sock")).await;
    assert!(line.contains(&taken) && line.contains("in use"), "{line}");

    let health = world.server().health.expect("a health port").port();
    let health = health.to_string();
    let flag = format!("--health-server-port={health}");
    let args = world.agent_args("a", 1, &["!--health-server-port", &flag]);
    let line = refused_agent(&args).await;
    assert!(line.contains(&health) && line.contains("in use"), "{line}");

    // The parent of this socket path is a file.
    let mut args = world.other_args("0", "-second.sock");
    let file = world.files.ca_file();
    args.push(format!("--frontend=grpc=unix:{}/x.sock", file.display()));
    let line = refused_server(&args).await;
    assert!(line.contains("x.sock"), "{line}");
}

/// Existing links are not affected.
///
/// Upstream (configuration): Replaced certificates, CAs, tokens and kubeconfigs are used from the next handshake on.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn replaced_server_certificate_is_used_by_the_next_handshake() {
    let (world, _agent, target, _echo) = World::with_echo().await;
    let address = world.server().agents;
    let now = async || {
        let dialed = tls::dial_to(&world, b"h2", address, Some("agent")).await;
        tls::shown(&dialed.expect("welcome"))
    };
    let before = now().await;
    assert_eq!(now().await, before);

    // Broken files keep the old certificate in use, and are counted.
    let good = fs::read(world.files.cert("server")).expect("a file");
    fs::write(world.files.cert("server"), "broken").expect("writable");
    world
        .server_metric("adit_tls_reloads_total{result=\"failed\"}", 1.0)
        .await;
    assert_eq!(now().await, before);
    fs::write(world.files.cert("server"), good).expect("writable");

    let names = ["127.0.0.1".to_owned()];
    world
        .files
        .issue("server", Usage::Server, &names)
        .expect("a new pair");
    eventually("the new certificate is shown", async || {
        now().await != before
    })
    .await;
    assert_eq!(world.server().links(), 1);
    world.assert_serves(&target).await;
}

/// The log names the file for which `adit_tls_reloads_total` counts a failure.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn broken_new_certificate_is_named_in_the_log() {
    let processes = Processes::start(&[]).await;
    let path = processes.world.files.cert("server");
    fs::write(&path, "broken").expect("writable");
    let name = path.to_str().expect("text");
    until("the line that names the file", || {
        let log = processes.server.log();
        let told = "new TLS files are broken; the old ones stay in use";
        log.lines()
            .any(|line| line.contains(told) && line.contains(name))
    })
    .await;
}

/// Rotates the CA and both certificates without a restart of the agent.
///
/// Upstream (configuration): Replaced certificates, CAs, tokens and kubeconfigs are used from the next handshake on.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn replaced_ca_applies_to_the_next_handshake_on_both_sides() {
    let (mut world, _agent, target, _echo) = World::with_echo().await;
    let dir = world.files.dir().to_owned();
    let new_ca = ThrowawayCa::new("the next CA").expect("a CA");
    let old = (dir.join("old.crt"), dir.join("old.key"));
    let old_ca = dir.join("old-ca.crt");
    fs::copy(world.files.cert("agent"), &old.0).expect("a copy");
    fs::copy(world.files.key("agent"), &old.1).expect("a copy");
    fs::copy(world.files.ca_file(), &old_ca).expect("a copy");

    let names = ["127.0.0.1".to_owned()];
    for (name, usage, names) in [
        ("server", Usage::Server, &names[..]),
        ("agent", Usage::Client, &[]),
    ] {
        let pair = new_ca.issue(usage, name, names).expect("a pair");
        fs::write(world.files.cert(name), pair.cert_pem).expect("writable");
        fs::write(world.files.key(name), pair.key_pem).expect("writable");
    }
    fs::write(world.files.ca_file(), new_ca.cert_pem()).expect("writable");

    let address = world.server().agents;
    let (ca, cert, key) = (
        world.files.ca_file(),
        world.files.cert("agent"),
        world.files.key("agent"),
    );
    eventually("the new agent is welcome", async || {
        match tls::dial(address, &ca, Some((&cert, &key))).await {
            Ok(stream) => welcome(stream).await,
            Err(_old_server_certificate) => false,
        }
    })
    .await;
    let refused = tls::dial(address, &ca, Some((&old.0, &old.1))).await;
    assert!(turned_away(refused).await, "a certificate of the old CA");
    assert!(
        tls::dial(address, &old_ca, Some((&cert, &key)))
            .await
            .is_err(),
        "the old server certificate"
    );

    // The restarted server accepts only the agent's new certificate.
    world.restart_server().await;
    world.links(1).await;
    world.assert_serves(&target).await;
}

/// Whether the server answers HTTP/2, and thus has accepted the client's certificate.
async fn welcome(mut stream: tokio_rustls::client::TlsStream<tokio::net::TcpStream>) -> bool {
    use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
    let preface = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\0\0\0\x04\0\0\0\0\0";
    if stream.write_all(preface).await.is_err() {
        return false;
    }
    let mut byte = [0];
    matches!(within("a verdict", stream.read(&mut byte)).await, Ok(1))
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn stale_socket_files_are_replaced_and_removed_at_the_end() {
    let (mut world, _agent) = World::with_agent().await;
    let path = world.grpc();
    world.stop_server(Duration::ZERO).await;
    until("the socket file is gone", || !path.exists()).await;
    drop(std::os::unix::net::UnixListener::bind(&path).expect("free"));
    assert!(path.exists(), "a stale file");
    let plan = server_plan(&world.server_args("0")).expect("flags are right");
    let server = server::start(&plan)
        .await
        .expect("it starts over a stale file");
    drop(world.channel().await);
    within("the server's end", server.stop(Some(Duration::ZERO))).await;
}

#[test]
fn folder_of_throwaway_keys_has_mode_0700() {
    let files = ThrowawayFiles::create(&["localhost".to_owned()]).expect("certificates");
    let mode = fs::metadata(files.dir()).expect("a folder").permissions();
    assert_eq!(mode.mode() & 0o777, 0o700);
}
