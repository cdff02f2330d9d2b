//! A client of the proxy, in memory, and the far ends of its tunnels.

use std::sync::Arc;
use std::time::Duration;

use http::HeaderMap;
use tokio::io::{AsyncWriteExt as _, DuplexStream, duplex};
use tokio::sync::mpsc;
use tokio::task::JoinHandle;
use tokio_util::sync::CancellationToken;

use super::{received, within};
use crate::http::*;

pub(super) const PIPE: usize = 1 << 20;

/// Each tunnel's far end, and its target.
pub(super) struct World {
    pub(super) client: DuplexStream,
    pub(super) dialed: mpsc::Receiver<(String, DuplexStream)>,
    pub(super) leaving: CancellationToken,
    pub(super) served: JoinHandle<Option<(DuplexStream, bytes::Bytes)>>,
}

struct InMemory {
    dialed: mpsc::Sender<(String, DuplexStream)>,
}

impl Connector for InMemory {
    type Tunnel = DuplexStream;
    type Stream = DuplexStream;

    fn head_timeout(&self) -> Duration {
        Duration::from_secs(60)
    }

    fn authenticate(&self, _headers: &HeaderMap) -> Result<(), Refusal> {
        Ok(())
    }

    fn may_wait(&self) -> bool {
        true
    }

    async fn open(&self, target: &str, _alone: bool) -> Result<DuplexStream, Refusal> {
        if target.starts_with("away") {
            return Err(Refusal::from(&adit_core::failure::DialFailure::Target(
                "dial tcp 10.0.0.1:80: connect: connection refused".to_owned(),
            )));
        }
        let (near, far) = duplex(PIPE);
        self.dialed
            .send((target.to_owned(), far))
            .await
            .expect("the test waits");
        Ok(near)
    }

    fn parent(&self, target: &str) -> Option<Parent> {
        target.starts_with("behind").then(|| Parent {
            authorization: Some(http::HeaderValue::from_static("Basic b3Vycw==")),
        })
    }

    fn stream(&self, tunnel: DuplexStream) -> DuplexStream {
        tunnel
    }

    fn spawn(&self, work: impl Future<Output = ()> + Send + 'static) {
        tokio::spawn(work);
    }
}

impl World {
    pub(super) fn new() -> Self {
        let leaving = CancellationToken::new();
        let proxy = Arc::new(Proxy::new(64 * 1024, leaving.clone()));
        Self::with(proxy, leaving, PIPE)
    }

    /// `pipe`: bytes on their way from or to the client.
    pub(super) fn with(proxy: Arc<Proxy>, leaving: CancellationToken, pipe: usize) -> Self {
        let (client, io) = duplex(pipe);
        let (dialed, targets) = mpsc::channel(8);
        let connector = InMemory { dialed };
        let served = tokio::spawn(async move {
            match serve(io, proxy, connector).await {
                Served::Became(io, early, After::Tunnel(mut tunnel)) => {
                    tunnel.write_all(&early).await.expect("it is taken");
                    drop(tunnel);
                    Some((io, early))
                }
                Served::Became(mut io, early, After::Upgraded(upgrade)) => {
                    let mut target =
                        hyper_util::rt::TokioIo::new(upgrade.await.expect("it upgrades"));
                    target.write_all(&early).await.expect("it is taken");
                    let _ended = tokio::io::copy_bidirectional(&mut io, &mut target).await;
                    None
                }
                Served::Ended(mut io) => {
                    io.shutdown().await.expect("an orderly end");
                    None
                }
                Served::Broken(_) | Served::Lost(_) => None,
            }
        });
        Self {
            client,
            dialed: targets,
            leaving,
            served,
        }
    }

    pub(super) async fn say(&mut self, text: &str) {
        self.client
            .write_all(text.as_bytes())
            .await
            .expect("it is taken");
    }

    /// Asks for a page of a.test on a new connection to it.
    pub(super) async fn get(&mut self) -> DuplexStream {
        self.say("GET http://a.test/ HTTP/1.1\r\nHost: a.test\r\n\r\n")
            .await;
        let (_to, mut target) = self.target().await;
        received(&mut target, "\r\n\r\n").await;
        target
    }

    /// The next tunnel's far end.
    pub(super) async fn target(&mut self) -> (String, DuplexStream) {
        within(self.dialed.recv()).await.expect("a dial")
    }
}
