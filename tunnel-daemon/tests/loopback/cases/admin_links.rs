//! `adit links`, `adit drain` and `adit unlink`: what they show, and what they do to tunnels.

use std::path::Path;
use std::process::{Command, Output};

use adit::status::Socket;
use adit::status::model::Links;

use crate::support::connect;
use crate::support::lanes::{value, warm};
use crate::support::targets;
use crate::support::wait::{until, within_for};
use crate::support::world::{World, echo};

/// Limit for the end of a tunnel or of an agent.
const SOON: std::time::Duration = std::time::Duration::from_secs(15);

async fn world() -> World {
    World::start(&["--admin-socket={certs}/admin.sock"]).await
}

fn adit(command: &str, socket: &Path, more: &[&str]) -> Output {
    let socket = format!("--admin-socket={}", socket.display());
    Command::new(env!("CARGO_BIN_EXE_adit"))
        .args([&[command, socket.as_str()], more].concat())
        .output()
        .expect("it runs")
}

fn says(output: &Output) -> String {
    let [out, err] = [&output.stdout, &output.stderr].map(|text| String::from_utf8_lossy(text));
    format!("{out}{err}")
}

fn links(world: &World) -> Links {
    Socket::new(&world.admin_socket())
        .ask("/v1/links")
        .expect("an answer")
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_unlinked_agent_loses_its_tunnels_and_may_reconnect() {
    let (target, _echo) = targets::local_echo().await;
    let world = world().await;
    let agent = world.agent("agent 1&2", &[]).await;
    world.links(1).await;
    warm(&world).await;
    let mut on_lane = world.tunnel(&target).await;
    echo(&mut on_lane, b"before").await;
    let shown = links(&world).links.remove(0);
    let release = env!("CARGO_PKG_VERSION");
    let inventory = (shown.dialect.as_str(), shown.version.as_deref());
    assert_eq!(inventory, ("adit", Some(release)));
    let by_release = format!("adit_links_by_version{{version=\"{release}\"}}");
    assert_eq!(value(&world, &by_release), 1.0);
    let first = shown.link;
    let done = adit("unlink", &world.admin_socket(), &["--agent=agent 1&2"]);
    assert!(done.status.success(), "{}", says(&done));
    assert!(says(&done).contains("of agent 1&2 ends"), "{}", says(&done));
    let over = within_for(SOON, "the tunnel's end", on_lane.read()).await;
    assert!(!matches!(over, Ok(Some(_))), "{over:?}");
    let ended = "adit_links_ended_total{reason=\"unlinked\"}";
    assert_eq!(value(&world, ended), 1.0);
    until("another link of it", || {
        let links = links(&world).links;
        links.len() == 1 && links[0].link != first
    })
    .await;
    world.assert_serves(&target).await;
    agent.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_drained_agent_keeps_its_tunnels_and_gets_no_new_ones() {
    let (target, _echo) = targets::local_echo().await;
    let world = world().await;
    let first = world.agent("first", &[]).await;
    world.links(1).await;
    let mut kept = connect::open(&world.connect(), &target).await;
    connect::echo(&mut kept, b"before").await;
    let second = world.agent("second", &["--agent-identifiers=host=b"]).await;
    world.links(2).await;
    let number = links(&world).links[0]
        .link
        .expect("a server's links have one");
    let done = adit(
        "drain",
        &world.admin_socket(),
        &[&format!("--link={number}")],
    );
    assert!(done.status.success(), "{}", says(&done));
    assert!(says(&done).contains("of first drains"), "{}", says(&done));
    let mut opened = Vec::new();
    for _tunnel in 0..20 {
        opened.push(connect::open(&world.connect(), &target).await);
    }
    connect::echo(&mut kept, b"after").await;
    let both = links(&world);
    let seen: Vec<(&str, &str, u64)> = both
        .links
        .iter()
        .map(|link| (link.peer.as_str(), link.condition.as_str(), link.tunnels))
        .collect();
    assert_eq!(seen, [("first", "draining", 1), ("second", "serving", 20)]);
    assert_eq!(both.links[1].identifiers.as_deref(), Some("host=b"));
    // A draining agent still serves when it is the only one.
    within_for(SOON, "the agent's end", second.stop()).await;
    world.links(1).await;
    world.assert_serves(&target).await;
    first.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn links_are_listed_and_invalid_commands_change_nothing() {
    let world = world().await;
    let of_agent = world.dir.path().join("agent.sock");
    let flag = format!("--admin-socket={}", of_agent.display());
    let agent = world.agent("agent-1", &[&flag]).await;
    world.links(1).await;
    let shown = adit("links", &world.admin_socket(), &["--agent=agent-1"]);
    let text = says(&shown);
    for part in [
        "agent        agent-1",
        "CN=agent",
        "no identifiers",
        "serving for",
    ] {
        assert!(text.contains(part), "{part}: {text}");
    }
    let none = adit("links", &world.admin_socket(), &["--agent=agent"]);
    assert_eq!(says(&none), "no links\n");
    let json = adit("links", &world.admin_socket(), &["--json"]);
    let json: Links = serde_json::from_slice(&json.stdout).expect("JSON");
    assert_eq!(json.links_total, 1);
    for (command, socket, args, part) in [
        ("unlink", world.admin_socket(), &[][..], "--agent <ID>"),
        (
            "unlink",
            world.admin_socket(),
            &["--agent=agent"][..],
            "no such link",
        ),
        (
            "drain",
            world.admin_socket(),
            &["--link=4711"][..],
            "no such link",
        ),
        ("drain", of_agent, &["--agent=a"][..], "ask its server"),
    ] {
        let refused = adit(command, &socket, args);
        assert!(!refused.status.success(), "{command} {args:?}");
        assert!(says(&refused).contains(part), "{}", says(&refused));
    }
    // An unlink must name its links, and GET changes nothing.
    let asker = Socket::new(&world.admin_socket());
    let error = asker
        .change::<Links>("/v1/unlink?")
        .unwrap_err()
        .to_string();
    assert!(
        error.contains("name links by agent=ID or link=N"),
        "{error}"
    );
    let error = asker
        .text("/v1/unlink?agent=agent-1")
        .unwrap_err()
        .to_string();
    assert!(error.contains("only POST"), "{error}");
    world.links(1).await;
    agent.stop().await;
}
