//! Servers that know each other.

use std::net::SocketAddr;

use adit::server::{self, RunningServer};
pub(crate) use adit_testkit::peers::PeerFiles;

use super::wait::until;
use super::world::{World, server_plan};

/// A server that agents link to, which serves peers.
pub(crate) async fn holder(files: &PeerFiles, flags: &[&str]) -> World {
    let peer = files.flags("holder");
    let mut all: Vec<&str> = peer.iter().map(String::as_str).collect();
    all.extend(["--peer-bind=127.0.0.1:0", "--server-id=holder"]);
    all.extend(flags);
    World::start(&all).await
}

/// Another server of the same agents and clients, which asks the servers at these addresses. Its sockets end in its name.
pub(crate) async fn asker(
    world: &World,
    files: &PeerFiles,
    name: &str,
    peers: &[SocketAddr],
    flags: &[&str],
) -> RunningServer {
    let mut args = asker_args(world, files, name, peers);
    if flags.iter().any(|flag| flag.starts_with("--server-id")) {
        args.retain(|arg| !arg.starts_with("--server-id"));
    }
    args.extend(flags.iter().map(|flag| (*flag).to_owned()));
    let plan = server_plan(&args).expect("flags are right");
    server::start(&plan).await.expect("the server starts")
}

/// The command line of an [`asker`], program name included.
pub(crate) fn asker_args(
    world: &World,
    files: &PeerFiles,
    name: &str,
    peers: &[SocketAddr],
) -> Vec<String> {
    let mut args = world.other_args("0", &format!(".{name}"));
    let of_holder = [
        "--peer-",
        "--server-id",
        "--server-count",
        "--client-allow-target",
    ];
    args.retain(|arg| !of_holder.iter().any(|flag| arg.starts_with(flag)));
    args.extend(files.flags(name));
    args.push(format!("--server-id={name}"));
    args.extend(peers.iter().map(|peer| format!("--peer={peer}")));
    args
}

/// Waits until a server knows the keys of this many peers.
pub(crate) async fn linked(server: &RunningServer, peers: usize) {
    until(&format!("{peers} peers"), || server.linked_peers() == peers).await;
}
