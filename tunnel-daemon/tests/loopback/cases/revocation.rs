//! Agents whose certificates become invalid while they are connected.

use std::path::PathBuf;
use std::time::Duration;

use adit_testkit::certificates::{self, ThrowawayCa, ThrowawayFiles, Usage};

use super::deny::replace as write;
use crate::support::lanes::{value, warm};
use crate::support::targets;
use crate::support::wait::{until, within_for};
use crate::support::world::{World, echo};

/// Time until the server cuts a lane's tunnel whose agent may not stay.
const SOON: Duration = Duration::from_secs(15);
const ENDED: &str = "adit_links_ended_total{reason=\"certificate\"}";
const HANDSHAKES: &str = "adit_handshakes_failed_total{reason=\"failed\"}";

fn crl(files: &ThrowawayFiles) -> PathBuf {
    files.dir().join("crl.pem")
}

/// Writes a revocation list of the world's CA that contains the certificates of these names.
fn revoke(files: &ThrowawayFiles, names: &[&str]) {
    let certificates = names
        .iter()
        .map(|name| std::fs::read_to_string(files.cert(name)).expect("a certificate"));
    let certificates: Vec<String> = certificates.collect();
    let certificates: Vec<&str> = certificates.iter().map(String::as_str).collect();
    let list = certificates::revoke(files.ca(), &certificates);
    write(&crl(files), &list.expect("a list"));
}

/// Issues a certificate for a second agent, `agent-2`, and writes an empty revocation list.
fn prepare(files: &ThrowawayFiles) {
    files.issue("agent-2", Usage::Client, &[]).expect("a pair");
    revoke(files, &[]);
}

fn as_second(files: &ThrowawayFiles) -> [String; 4] {
    [
        "!--agent-cert".to_owned(),
        "!--agent-key".to_owned(),
        format!("--agent-cert={}", files.cert("agent-2").display()),
        format!("--agent-key={}", files.key("agent-2").display()),
    ]
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_agent_whose_certificate_is_revoked_loses_its_link_and_its_tunnels() {
    let (target, _echo) = targets::local_echo().await;
    let flags = [
        "--agent-crl={certs}/crl.pem",
        "--proxy-strategies=destHost,default",
    ];
    let world = World::start_with(prepare, &flags).await;
    let second = as_second(&world.files);
    let second: Vec<&str> = second.iter().map(String::as_str).collect();
    let other = [&second[..], &["--agent-identifiers=host=elsewhere"]].concat();
    let other = world.agent("agent-2", &other).await;
    let agent = world.agent_for("agent-1", "ipv4=127.0.0.1").await;
    world.links(2).await;
    warm(&world).await;
    let mut on_lane = world.tunnel(&target).await;
    echo(&mut on_lane, b"before").await;
    revoke(&world.files, &["agent"]);
    world.links(1).await;
    let over = within_for(SOON, "the tunnel's end", on_lane.read()).await;
    assert!(!matches!(over, Ok(Some(_))), "{over:?}");
    assert_eq!(value(&world, ENDED), 1.0);
    // The agent reconnects, and its handshake fails.
    until("a refusal", || value(&world, HANDSHAKES) >= 1.0).await;
    world.assert_serves(&target).await;
    // An invalid list changes nothing.
    write(&crl(&world.files), "nonsense\n");
    let refused = value(&world, HANDSHAKES);
    until("another refusal", || {
        value(&world, HANDSHAKES) >= refused + 3.0
    })
    .await;
    world.links(1).await;
    revoke(&world.files, &["agent-2"]);
    world.server_metric(ENDED, 2.0).await;
    world.links(1).await;
    agent.stop().await;
    other.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_agent_whose_ca_is_removed_loses_its_link() {
    let (world, agent) = World::with_agent().await;
    let another = ThrowawayCa::new("another").expect("a CA").cert_pem();
    // The bundle contains both CAs, so that no agent is refused while one replaces the other.
    let both = format!("{}{another}", world.files.ca().cert_pem());
    write(&world.files.ca_file(), &both);
    let reloads = "adit_tls_reloads_total{result=\"ok\"}";
    until("the bundle of both", || value(&world, reloads) >= 1.0).await;
    write(&world.files.ca_file(), &another);
    world.links(0).await;
    assert_eq!(value(&world, ENDED), 1.0);
    write(&world.files.ca_file(), &both);
    world.links(1).await;
    agent.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_certificate_without_a_crl_of_its_issuer_is_refused() {
    let foreign = |files: &ThrowawayFiles| {
        let another = ThrowawayCa::new("another").expect("a CA");
        let list = certificates::revoke(&another, &[]);
        write(&crl(files), &list.expect("a list"));
    };
    let world = World::start_with(foreign, &["--agent-crl={certs}/crl.pem"]).await;
    let agent = world.agent("agent-1", &[]).await;
    until("refusals", || value(&world, HANDSHAKES) >= 3.0).await;
    world.links(0).await;
    revoke(&world.files, &[]);
    world.links(1).await;
    agent.stop().await;
}
