//! CONNECT clients on every kind of socket that a frontend listens on.

use std::net::SocketAddr;

use adit::agent::RunningAgent;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::{TcpStream, UnixStream};

use super::world::World;
use super::{connect, tls};

/// A client's connection of any kind.
pub(crate) trait Io: AsyncRead + AsyncWrite + Send + Unpin {}

impl<T: AsyncRead + AsyncWrite + Send + Unpin> Io for T {}

/// The kind of socket that a client connects to.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Kind {
    Unix,
    Tcp,
    Tls,
}

impl Kind {
    pub(crate) const ALL: [Self; 3] = [Self::Unix, Self::Tcp, Self::Tls];

    /// Flags that a world's server needs for this kind.
    pub(crate) fn flags(self) -> &'static [&'static str] {
        match self {
            Self::Unix => &[],
            Self::Tcp => &[
                "--frontend=http-connect=tcp:127.0.0.1:0",
                "--insecure-plaintext-frontend",
            ],
            Self::Tls => &[
                "--frontend=http-connect=tcp:127.0.0.1:0",
                "--server-cert={certs}/server.crt",
                "--server-key={certs}/server.key",
                "--server-ca-cert={certs}/ca.crt",
            ],
        }
    }

    /// A server for such clients and an agent, with tunnels on lanes or on the link.
    pub(crate) async fn world(self, lanes: bool) -> (World, RunningAgent) {
        World::on(lanes, self.flags()).await
    }

    async fn connect(self, world: &World, frontend: Option<SocketAddr>) -> Box<dyn Io> {
        let frontend = || frontend.expect("a frontend on TCP");
        match self {
            Self::Unix => Box::new(UnixStream::connect(world.connect()).await.expect("welcome")),
            Self::Tcp => Box::new(TcpStream::connect(frontend()).await.expect("welcome")),
            Self::Tls => {
                let dial = tls::dial_to(world, b"http/1.1", frontend(), Some("client")).await;
                Box::new(dial.expect("welcome"))
            }
        }
    }

    /// A connection to the first frontend of this kind, before any request.
    pub(crate) async fn connect_first(self, world: &World) -> Box<dyn Io> {
        let frontend = world.server().frontends.first().copied();
        self.connect(world, frontend).await
    }

    /// Opens a tunnel; fails the test on any answer but a 200.
    pub(crate) async fn open(self, world: &World, target: &str) -> Box<dyn Io> {
        let frontend = world.server().frontends.first().copied();
        self.open_at(world, frontend, target).await
    }

    /// As [`Self::open`], at a server that may be a separate process. `frontend` is its TCP frontend, if it has one.
    pub(crate) async fn open_at(
        self,
        world: &World,
        frontend: Option<SocketAddr>,
        target: &str,
    ) -> Box<dyn Io> {
        let mut stream = self.connect(world, frontend).await;
        connect::dial(&mut stream, target).await;
        stream
    }
}
