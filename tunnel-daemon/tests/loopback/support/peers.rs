//! Servers that know each other.

use std::net::SocketAddr;
use std::path::PathBuf;

use adit::server::{self, RunningServer};
use adit_tls::pki::{self, Authority, Wanted};
use adit_tls::selfsigned::Usage;
use tempfile::TempDir;

use super::wait::until;
use super::world::{World, server_plan};

/// The authority of peers.
pub(crate) struct PeerFiles(TempDir);

impl PeerFiles {
    pub(crate) fn new() -> Self {
        let files = Self(TempDir::new().expect("a directory"));
        pki::init(files.0.path(), 30).expect("an authority");
        files
    }

    /// The flags with which a server is one of this authority's peers. Issues its certificate.
    pub(crate) fn flags(&self, name: &str) -> Vec<String> {
        self.flags_of(name, Authority::Peers, Usage::Peer)
    }

    /// Certificate and key of a peer, which are issued the first time.
    pub(crate) fn pair(&self, name: &str) -> (PathBuf, PathBuf) {
        let pair = (self.file(name, "crt"), self.file(name, "key"));
        if !pair.0.exists() {
            let _flags = self.flags(name);
        }
        pair
    }

    /// The authority of peers.
    pub(crate) fn ca(&self) -> PathBuf {
        self.file("peers-ca", "crt")
    }

    /// As [`Self::flags`], with a certificate of another authority or usage.
    pub(crate) fn flags_of(&self, name: &str, authority: Authority, usage: Usage) -> Vec<String> {
        let wanted = Wanted {
            stem: name.to_owned(),
            authority,
            usage,
            common_name: name.to_owned(),
            names: vec!["127.0.0.1".to_owned(), "localhost".to_owned()],
        };
        pki::issue(self.0.path(), 30, &[wanted]).expect("a certificate");
        vec![
            format!("--peer-cert={}", self.file(name, "crt").display()),
            format!("--peer-key={}", self.file(name, "key").display()),
            format!("--peer-ca-cert={}", self.ca().display()),
        ]
    }

    fn file(&self, stem: &str, ending: &str) -> PathBuf {
        self.0.path().join(format!("{stem}.{ending}"))
    }
}

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
