//! The deny list: which agents are refused, and which links and tunnels end when the list changes.

use std::path::{Path, PathBuf};
use std::time::Duration;

use tokio::io::{AsyncRead, AsyncReadExt as _};

use crate::support::connect;
use crate::support::lanes::{value, warm};
use crate::support::node;
use crate::support::raw::Connection;
use crate::support::targets;
use crate::support::wait::{until, within, within_for};
use crate::support::ways::Way;
use crate::support::world::{World, echo};

/// Limit for the end of a denied agent's tunnel.
const SOON: Duration = Duration::from_secs(15);

/// Replaces a file by a rename, as editors do.
pub(super) fn replace(file: &Path, text: &str) {
    let new = file.with_extension("new");
    std::fs::write(&new, text).expect("a file");
    std::fs::rename(&new, file).expect("a file");
}

struct Denying {
    world: World,
    file: PathBuf,
    _folder: tempfile::TempDir,
}

impl Denying {
    async fn start(text: &str, flags: &[&str]) -> Self {
        let folder = tempfile::tempdir().expect("a folder");
        let file = folder.path().join("deny");
        std::fs::write(&file, text).expect("a file");
        let flag = format!("--agent-deny={}", file.display());
        let world = World::start(&[&[flag.as_str()], flags].concat()).await;
        Self {
            world,
            file,
            _folder: folder,
        }
    }

    fn write(&self, text: &str) {
        replace(&self.file, text);
    }
}

/// Asserts that the client's read ends without bytes.
async fn assert_ends(stream: &mut (impl AsyncRead + Unpin)) {
    let mut some = [0; 16];
    let rest = within_for(SOON, "the tunnel's end", stream.read(&mut some)).await;
    assert!(!matches!(rest, Ok(1..)), "{rest:?}");
}

/// The server checks existing links against the changed list.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_denied_agent_loses_its_link_and_its_tunnels() {
    let (target, _echo) = targets::local_echo().await;
    let denying = Denying::start("# nobody yet\n", &["--proxy-strategies=destHost,default"]).await;
    let world = &denying.world;
    let other = world.agent_for("agent-2", "host=elsewhere").await;
    let agent = world.agent_for("agent-1", "ipv4=127.0.0.1").await;
    world.links(2).await;
    warm(world).await;
    let mut on_lane = world.tunnel(&target).await;
    echo(&mut on_lane, b"before").await;
    denying.write("id=agent-1 # stolen\n");
    world.links(1).await;
    let over = within_for(SOON, "the tunnel's end", on_lane.read()).await;
    assert!(!matches!(over, Ok(Some(_))), "{over:?}");
    let ended = "adit_links_ended_total{reason=\"denied\"}";
    assert_eq!(value(world, ended), 1.0);
    // The agent reconnects and is refused with a reason.
    let refused = "adit_agents_refused_total{reason=\"denied\"}";
    until("a refusal", || value(world, refused) >= 1.0).await;
    let connection = Connection::agent(world).await;
    let mut call = connection
        .call("/AgentService/Connect", &[("agentid", "agent-1")])
        .await;
    let headers = call.headers().await.expect("an answer");
    assert_eq!(headers["grpc-status"], "7");
    assert_eq!(
        headers["grpc-message"],
        "the deny list of this server names id=agent-1"
    );
    // The other agent still serves, and an invalid file changes nothing.
    world.assert_serves(&target).await;
    denying.write("nonsense\n");
    until("another refusal", || value(world, refused) >= 4.0).await;
    world.links(1).await;
    denying.write("");
    world.links(2).await;
    agent.stop().await;
    other.stop().await;
}

/// Tunnels that the agent opened end too.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_denied_agent_loses_access_to_the_control_plane() {
    let (target, _echo) = targets::local_echo().await;
    let destination = target.clone();
    let allowed = format!("--allowed-destination={destination}");
    let denying = Denying::start("", &[&allowed]).await;
    let agent = node::agent(&denying.world, &[&destination]).await;
    denying.world.links(1).await;
    let mut stream = node::connect(agent.target_listeners[0]).await;
    node::echo(&mut stream, b"before").await;
    denying.write("cn=agent\n");
    denying.world.links(0).await;
    assert_ends(&mut stream).await;
    within("the agent's end", agent.stop()).await;
}

/// Tunnels on raw lanes, which the relay moves, end too.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_relayed_tunnel_of_a_denied_agent_ends() {
    let way = Way::Epoll;
    let (target, _echo) = targets::local_echo().await;
    let denying = Denying::start("", way.flags()).await;
    let world = &denying.world;
    let agent = world.agent("agent-1", way.flags()).await;
    warm(world).await;
    let mut stream = connect::open(&world.connect(), &target).await;
    connect::echo(&mut stream, b"before").await;
    denying.write("cn=agent\n");
    world.links(0).await;
    assert_ends(&mut stream).await;
    within("the agent's end", agent.stop()).await;
}
