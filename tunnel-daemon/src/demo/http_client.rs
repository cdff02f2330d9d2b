//! HTTP/1.1 through a tunnel, and HTTP CONNECT to open one, by hyper's client: this project's code must not check itself.

use std::convert::Infallible;

use anyhow::{Context as _, ensure};
use bytes::Bytes;
use http::{Method, Request, Response, StatusCode, header};
use http_body_util::combinators::BoxBody;
use http_body_util::{BodyExt as _, Empty, Limited};
use hyper::body::Incoming;
use hyper::client::conn::http1::{self, SendRequest};
use hyper::upgrade::Upgraded;
use hyper_util::rt::TokioIo;
use tokio::io::{AsyncRead, AsyncWrite};

use super::targets::{Bulk, first_wrong, receipt};
use adit_net::tasks::Tasks;

/// Longest body that is read whole as text: pages, refusals, receipts.
const TEXT_BYTES_MAX: usize = 64 * 1024;

/// Any connected stream of bytes.
pub trait Io: AsyncRead + AsyncWrite + Send + Unpin + 'static {}
impl<T: AsyncRead + AsyncWrite + Send + Unpin + 'static> Io for T {}

type RequestBody = BoxBody<Bytes, Infallible>;

/// One HTTP/1.1 connection to a target. Dropping it closes the connection.
pub struct HttpClient {
    sender: SendRequest<RequestBody>,
    host: String,
}

/// A download that is not read. Dropping it closes the connection.
pub struct Stalled {
    _client: HttpClient,
    _unread: Response<Incoming>,
}

/// A proxy's response to CONNECT.
pub enum Connected {
    /// The tunnel.
    Open(TokioIo<Upgraded>),
    /// A refusal: status and text.
    Refused(StatusCode, String),
}

impl HttpClient {
    /// Speaks HTTP over `io`; `host` goes into the requests.
    ///
    /// # Errors
    /// The task cannot be started.
    pub async fn over(io: impl Io, host: &str, tasks: &Tasks) -> anyhow::Result<Self> {
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
        body: RequestBody,
    ) -> anyhow::Result<Response<Incoming>> {
        let request = Request::builder()
            .method(method)
            .uri(uri)
            .header(header::HOST, &self.host)
            .body(body)?;
        self.sender.ready().await?;
        Ok(self.sender.send_request(request).await?)
    }

    /// Fetches the text at `path`.
    ///
    /// # Errors
    /// A status other than 200, a long body, or a broken connection.
    pub async fn page(&mut self, path: &str) -> anyhow::Result<String> {
        let response = self.request(Method::GET, path, empty()).await?;
        let (status, text) = (response.status(), text_of(response).await?);
        ensure!(status == StatusCode::OK, "answer {status}: {text:?}");
        Ok(text)
    }

    /// Downloads `length` patterned bytes and compares each. `seen` gets the length of every chunk.
    ///
    /// # Errors
    /// The first wrong byte, a short or long body, or a broken connection.
    pub async fn download(&mut self, length: u64, seen: impl Fn(u64)) -> anyhow::Result<()> {
        let path = format!("/bulk/{length}");
        let mut response = self.request(Method::GET, &path, empty()).await?;
        ensure!(
            response.status() == StatusCode::OK,
            "answer {}",
            response.status()
        );
        let mut at = 0_u64;
        while let Some(frame) = response.frame().await {
            let frame = frame.with_context(|| format!("broken off at byte {at}"))?;
            let Ok(data) = frame.into_data() else {
                continue;
            };
            if let Some(wrong) = first_wrong(at, &data) {
                anyhow::bail!("byte {wrong} of {length} is wrong");
            }
            at += data.len() as u64;
            seen(data.len() as u64);
        }
        ensure!(at == length, "{at} bytes instead of {length}");
        Ok(())
    }

    /// Requests a download of `length` bytes and reads none of it.
    ///
    /// # Errors
    /// A status other than 200, or a broken connection.
    pub async fn stall(mut self, length: u64) -> anyhow::Result<Stalled> {
        let path = format!("/bulk/{length}");
        let response = self.request(Method::GET, &path, empty()).await?;
        let status = response.status();
        ensure!(status == StatusCode::OK, "answer {status}");
        Ok(Stalled {
            _client: self,
            _unread: response,
        })
    }

    /// Uploads `length` patterned bytes; the target compares them.
    ///
    /// # Errors
    /// The target's finding, or a broken connection.
    pub async fn upload(&mut self, length: u64) -> anyhow::Result<()> {
        let body = Bulk::new(length).boxed();
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
pub async fn connect(io: impl Io, authority: &str, tasks: &Tasks) -> anyhow::Result<Connected> {
    let mut client = HttpClient::over(io, authority, tasks).await?;
    let response = client.request(Method::CONNECT, authority, empty()).await?;
    let status = response.status();
    if status != StatusCode::OK {
        return Ok(Connected::Refused(status, text_of(response).await?));
    }
    let upgraded = hyper::upgrade::on(response).await?;
    Ok(Connected::Open(TokioIo::new(upgraded)))
}

fn empty() -> RequestBody {
    Empty::new().boxed()
}

async fn text_of(response: Response<Incoming>) -> anyhow::Result<String> {
    let body = Limited::new(response.into_body(), TEXT_BYTES_MAX);
    match body.collect().await {
        Ok(whole) => Ok(String::from_utf8_lossy(&whole.to_bytes()).into_owned()),
        Err(error) => Err(anyhow::anyhow!("cannot read the answer: {error}")),
    }
}
