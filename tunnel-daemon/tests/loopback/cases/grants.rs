//! Agent identities: grants of certificates, agent ids owned by another certificate, links per id.

use adit_testkit::certificates::Usage;

use crate::support::lanes::value;
use crate::support::raw::{Connection, grpc_status};
use crate::support::targets;
use crate::support::wait::until;
use crate::support::world::World;

const PERMISSION_DENIED: &str = "7";
const RESOURCE_EXHAUSTED: &str = "8";
const UNVERIFIED: &str = "adit_agent_claims_unverified";

/// Status and text of a refused agent.
async fn refused(connection: &Connection, id: &str, identifiers: &str) -> (String, String) {
    let headers = [("agentid", id), ("agentidentifiers", identifiers)];
    let mut call = connection.call("/AgentService/Connect", &headers).await;
    grpc_status(&call.headers().await.expect("an answer"))
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn certificate_claims_only_what_is_granted_to_it() {
    let (target, _echo) = targets::local_echo().await;
    let world = World::start(&[
        "--proxy-strategies=destHost",
        "--agent-grant=cn=agent,id=agent-1,ipv4=127.0.0.0/24",
        "--agent-grant=dns=*.gateways.test,id=gateway-{*},default-route=true",
    ])
    .await;
    let names = ["x.gateways.test".to_owned()];
    let issued = world.files.issue("gateway", Usage::Client, &names);
    issued.expect("a certificate");
    let agent = Connection::agent(&world).await;
    let gateway = Connection::agent_as(&world, "gateway").await;
    let stranger = Connection::agent_as(&world, "client").await;
    for (connection, id, identifiers, text) in [
        (&agent, "agent-2", "", "agent id \"agent-2\" is not granted"),
        (&agent, "gateway-x", "", "is not granted"),
        (
            &agent,
            "agent-1",
            "ipv4=127.0.0.1&ipv4=10.0.0.1",
            "agent identifier ipv4=10.0.0.1 is not granted",
        ),
        (
            &agent,
            "agent-1",
            "default-route=true",
            "default-route=true is not granted",
        ),
        (&gateway, "gateway-y", "", "is not granted"),
        (&stranger, "agent-1", "", "nothing is granted"),
    ] {
        let (status, message) = refused(connection, id, identifiers).await;
        assert_eq!(status, PERMISSION_DENIED, "{id} {identifiers}: {message}");
        assert!(message.contains(text), "{id} {identifiers}: {message}");
    }
    let (_status, message) = refused(&stranger, "agent-1", "").await;
    assert!(message.contains("CN=client"), "{message}");
    assert_eq!(world.server().links(), 0);
    let series = "adit_agents_refused_total{reason=\"not_granted\"}";
    assert_eq!(value(&world, series), 7.0);

    let _gateway = gateway.link("gateway-x", "default-route=true").await;
    let _agent = world.agent_for("agent-1", "ipv4=127.0.0.1").await;
    world.links(2).await;
    world.assert_serves(&target).await;
    assert_eq!(value(&world, UNVERIFIED), 0.0);
    assert_eq!(value(&world, "adit_claimed_identities_total"), 0.0);
}

/// As upstream does. A metric counts such claims.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn without_grants_claims_are_accepted_and_counted() {
    let world = World::start(&[]).await;
    let claims = "cidr=0.0.0.0/0&default-route=true";
    let linked = Connection::linked(&world, "whoever", claims).await;
    world.server_metric(UNVERIFIED, 1.0).await;
    drop(linked);
    world.server_metric(UNVERIFIED, 0.0).await;
    assert_eq!(value(&world, "adit_claimed_identities_total"), 1.0);
}

/// The newest stream wins only within one certificate.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn another_certificate_never_takes_the_dials_of_an_agent_id() {
    let (target, _echo) = targets::local_echo().await;
    let world = World::start(&[]).await;
    let owner = world.agent("same", &[]).await;
    world.links(1).await;
    let connection = Connection::agent_as(&world, "client").await;
    let mut intruder = connection.link("same", "").await;
    world.links(2).await;
    // The intruder answers no dial, so a dial that reached the intruder would hang.
    for _dial in 0..10 {
        world.assert_serves(&target).await;
    }
    // Without the owner the id is free, so the intruder gets the dial.
    owner.stop().await;
    world.links(1).await;
    let (_client, mut call) = Connection::proxied(&world).await;
    call.dial(1, &target);
    assert!(intruder.payload().await.is_some());
}

/// Limit (peers): Links of one certificate under one agent id
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn links_of_one_certificate_under_one_id_are_capped() {
    let world = World::start(&["--links-per-agent=2"]).await;
    let connection = Connection::agent(&world).await;
    let first = connection.link("same", "").await;
    let _second = connection.link("same", "").await;
    let (status, message) = refused(&connection, "same", "").await;
    assert_eq!(status, RESOURCE_EXHAUSTED, "{message}");
    assert!(message.contains("2 links"), "{message}");
    let series = "adit_agents_refused_total{reason=\"links_per_agent\"}";
    assert_eq!(value(&world, series), 1.0);
    // The cap applies neither to other ids nor to other certificates.
    let _other_id = connection.link("other", "").await;
    let others = Connection::agent_as(&world, "client").await;
    let _other_holder = others.link("same", "").await;
    world.links(4).await;

    drop(first);
    until("the first link is gone", || world.server().links() == 3).await;
    let _again = connection.link("same", "").await;
    world.links(4).await;
}
