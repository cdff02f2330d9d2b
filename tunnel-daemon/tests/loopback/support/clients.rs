//! CONNECT clients on every kind of socket that a frontend listens on.

use std::net::SocketAddr;

use adit::agent::RunningAgent;
use tokio::io::{AsyncRead, AsyncReadExt as _, AsyncWrite, AsyncWriteExt as _};
use tokio::net::{TcpStream, UnixStream};

use super::lanes::warm;
use super::wait::within;
use super::world::World;
use super::{connect, tls};

/// What a client has in its hands, whatever it is.
pub(crate) trait Io: AsyncRead + AsyncWrite + Send + Unpin {}

impl<T: AsyncRead + AsyncWrite + Send + Unpin> Io for T {}

/// What a client connects by.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Kind {
    Unix,
    Tcp,
    Tls,
}

impl Kind {
    pub(crate) const ALL: [Self; 3] = [Self::Unix, Self::Tcp, Self::Tls];

    /// What a world's server needs to serve it, beside what it has.
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

    /// A server and an agent whose tunnels ride lanes, or the link, for such clients.
    pub(crate) async fn world(self, lanes: bool) -> (World, RunningAgent) {
        let mut flags = self.flags().to_vec();
        if !lanes {
            flags.push("--lanes-per-link=0");
        }
        let world = World::start(&flags).await;
        let agent = world.agent("agent-1", &[]).await;
        world.links(1).await;
        if lanes {
            warm(&world).await;
        }
        (world, agent)
    }

    async fn connect(self, world: &World, frontend: Option<SocketAddr>) -> Box<dyn Io> {
        let files = &world.files;
        let frontend = || frontend.expect("a frontend on TCP");
        match self {
            Self::Unix => Box::new(UnixStream::connect(world.connect()).await.expect("welcome")),
            Self::Tcp => Box::new(TcpStream::connect(frontend()).await.expect("welcome")),
            Self::Tls => {
                let (cert, key) = (files.cert("client"), files.key("client"));
                let identity = Some((cert.as_path(), key.as_path()));
                let ca = files.ca_file();
                let dial = tls::dial_as(b"http/1.1", frontend(), &ca, identity).await;
                Box::new(dial.expect("welcome"))
            }
        }
    }

    /// A connection to the first frontend of this kind, before any request.
    pub(crate) async fn connect_first(self, world: &World) -> Box<dyn Io> {
        let frontend = world.server().frontends.first().copied();
        self.connect(world, frontend).await
    }

    /// An open tunnel; fails the test on anything but a 200.
    pub(crate) async fn open(self, world: &World, target: &str) -> Box<dyn Io> {
        let frontend = world.server().frontends.first().copied();
        self.open_at(world, frontend, target).await
    }

    /// The same at a server that may be a process of its own, by this frontend if it is to be one on TCP.
    pub(crate) async fn open_at(
        self,
        world: &World,
        frontend: Option<SocketAddr>,
        target: &str,
    ) -> Box<dyn Io> {
        const OPEN: &[u8; 39] = b"HTTP/1.1 200 Connection Established\r\n\r\n";
        let mut stream = self.connect(world, frontend).await;
        let asked = stream.write_all(&connect::head(target)).await;
        asked.expect("the request is taken");
        let mut answer = [0; OPEN.len()];
        within("an answer to CONNECT", stream.read_exact(&mut answer))
            .await
            .expect("an answer");
        assert_eq!(&answer, OPEN, "{}", String::from_utf8_lossy(&answer));
        stream
    }
}
