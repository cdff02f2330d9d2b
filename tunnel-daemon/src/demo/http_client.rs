//! HTTP/1.1 through a tunnel, and HTTP CONNECT to open one, by hyper's client: this project's code must not check itself.

use anyhow::ensure;
use http::{Method, Request, Response, StatusCode, header};
use http_body_util::{BodyExt as _, Empty, Limited};
use hyper::body::Incoming;
use hyper::client::conn::http1::{self, SendRequest};
use hyper_util::rt::TokioIo;
use tokio::io::{AsyncRead, AsyncWrite};

use super::targets::{Body, GREETING, bulk, compared, receipt};
use adit_net::tasks::Tasks;

/// Longest body that is read whole as text: pages, refusals, receipts.
const TEXT_BYTES_MAX: usize = 64 * 1024;

/// Any connected stream of bytes.
pub(super) trait Io: AsyncRead + AsyncWrite + Send + Unpin + 'static {}
impl<T: AsyncRead + AsyncWrite + Send + Unpin + 'static> Io for T {}

/// One HTTP/1.1 connection to a target. Dropping it closes the connection.
pub(super) struct HttpClient {
    sender: SendRequest<Body>,
    host: String,
}

/// The answer to a request for a tunnel.
pub(super) enum Opened {
    Tunnel(Box<dyn Io>),
    /// The server refuses: its HTTP status, if the frontend speaks HTTP, and its text.
    Refused(Option<StatusCode>, String),
}

impl HttpClient {
    /// Speaks HTTP over `io`; `host` goes into the requests.
    ///
    /// # Errors
    /// The task cannot be started.
    pub(super) async fn over(io: impl Io, host: &str, tasks: &Tasks) -> anyhow::Result<Self> {
        let (sender, connection) = http1::handshake(TokioIo::new(io)).await?;
        tasks.spawn("demo-http", async move {
            // The next request reports the connection's error.
            let _over = connection.with_upgrades().await;
        })?;
        let host = host.to_owned();
        Ok(Self { sender, host })
    }

    async fn request(
        &mut self,
        method: Method,
        uri: &str,
        body: Body,
    ) -> anyhow::Result<Response<Incoming>> {
        let request = Request::builder()
            .method(method)
            .uri(uri)
            .header(header::HOST, &self.host)
            .body(body)?;
        self.sender.ready().await?;
        Ok(self.sender.send_request(request).await?)
    }

    /// Fetches the target's page and compares it.
    ///
    /// # Errors
    /// Another page, a status other than 200, or a broken connection.
    pub(super) async fn page(&mut self) -> anyhow::Result<()> {
        let response = self.request(Method::GET, "/", empty()).await?;
        let (status, text) = (response.status(), text_of(response).await?);
        ensure!(status == StatusCode::OK, "answer {status}: {text:?}");
        ensure!(text == GREETING, "answer {text:?} instead of {GREETING:?}");
        Ok(())
    }

    /// Downloads `length` patterned bytes and compares each.
    ///
    /// # Errors
    /// The first wrong byte, a short or long body, or a broken connection.
    pub(super) async fn download(&mut self, length: u64) -> anyhow::Result<()> {
        let at = compared(self.bulk(length).await?.into_body()).await?;
        ensure!(at == length, "{at} bytes instead of {length}");
        Ok(())
    }

    /// Requests a download of `length` bytes, and leaves the reading to the caller.
    ///
    /// # Errors
    /// A status other than 200, or a broken connection.
    pub(super) async fn bulk(&mut self, length: u64) -> anyhow::Result<Response<Incoming>> {
        let path = format!("/bulk/{length}");
        let response = self.request(Method::GET, &path, empty()).await?;
        let status = response.status();
        ensure!(status == StatusCode::OK, "answer {status}");
        Ok(response)
    }

    /// Uploads `length` patterned bytes; the target compares them.
    ///
    /// # Errors
    /// The target's finding, or a broken connection.
    pub(super) async fn upload(&mut self, length: u64) -> anyhow::Result<()> {
        let body = bulk(length);
        let response = self.request(Method::POST, "/upload", body).await?;
        let (status, text) = (response.status(), text_of(response).await?);
        let right = status == StatusCode::OK && text == receipt(length);
        ensure!(right, "the target answered {status}: {text:?}");
        Ok(())
    }
}

/// Asks the proxy at the other end of `io` for a tunnel to `authority`.
///
/// # Errors
/// A broken connection; a refusal is not an error.
pub(super) async fn connect(io: impl Io, authority: &str, tasks: &Tasks) -> anyhow::Result<Opened> {
    let mut client = HttpClient::over(io, authority, tasks).await?;
    let response = client.request(Method::CONNECT, authority, empty()).await?;
    let status = response.status();
    if status != StatusCode::OK {
        return Ok(Opened::Refused(Some(status), text_of(response).await?));
    }
    let upgraded = hyper::upgrade::on(response).await?;
    Ok(Opened::Tunnel(Box::new(TokioIo::new(upgraded))))
}

fn empty() -> Body {
    Empty::new().boxed()
}

async fn text_of(response: Response<Incoming>) -> anyhow::Result<String> {
    let body = Limited::new(response.into_body(), TEXT_BYTES_MAX);
    match body.collect().await {
        Ok(whole) => Ok(String::from_utf8_lossy(&whole.to_bytes()).into_owned()),
        Err(error) => Err(anyhow::anyhow!("cannot read the answer: {error}")),
    }
}
