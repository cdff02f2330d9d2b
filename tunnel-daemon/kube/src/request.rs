//! One request to the API server, bounded in time and size.

use std::time::Duration;

use bytes::{Bytes, BytesMut};
use futures_util::StreamExt as _;
use http::{Method, Request, StatusCode, header};
use http_body_util::{BodyDataStream, BodyExt as _, LengthLimitError, Limited};
use kube::client::Body;
use serde::{Deserialize, Serialize, de::DeserializeOwned};

use crate::access::{AccessError, Api};
use crate::words;

/// Time for a request, including the connection that it may need.
pub const TIMEOUT: Duration = Duration::from_secs(10);
/// Longest answer, and longest line of a watch.
const ANSWER_BYTES_MAX: usize = 1 << 20;
/// Longest part of a foreign error text that is passed on.
const TEXT_BYTES_MAX: usize = 512;

/// Why a request has no usable answer.
#[derive(Clone, Debug, thiserror::Error)]
pub enum RequestError {
    /// The configuration cannot be used.
    #[error(transparent)]
    Access(#[from] AccessError),
    /// No connection, or the connection broke.
    #[error("{0}")]
    Transport(String),
    /// The API server refuses.
    #[error("{message} (HTTP status {status})", status = .status.as_u16())]
    Refused {
        /// HTTP status.
        status: StatusCode,
        /// One word for it, if the API server has one: `NotFound`, `Conflict`.
        reason: String,
        /// Message of the API server, if there is one.
        message: String,
    },
    /// The answer is not the expected object.
    #[error("cannot parse the answer of the API server: {0}")]
    NotUnderstood(String),
    /// The answer is too long.
    #[error("the API server's answer is longer than {0} bytes")]
    TooLong(usize),
    /// The answer did not come in time.
    #[error("no answer from the API server in time")]
    TimedOut,
}

impl RequestError {
    /// The HTTP status, if there was an answer.
    #[must_use]
    pub fn status(&self) -> Option<StatusCode> {
        match self {
            Self::Refused { status, .. } => Some(*status),
            _ => None,
        }
    }

    /// HTTP status, 0 without an answer, and one word for a metric.
    #[must_use]
    pub fn code_and_reason(&self) -> (u16, &str) {
        match self {
            Self::Refused { status, reason, .. } => (status.as_u16(), reason),
            Self::TimedOut => (0, "Timeout"),
            Self::Access(_) | Self::Transport(_) => (0, "Unreachable"),
            Self::NotUnderstood(_) | Self::TooLong(_) => (0, "Invalid"),
        }
    }
}

/// What the API server sends in place of an object.
#[derive(Deserialize, Default)]
struct Status {
    reason: Option<String>,
    message: Option<String>,
}

/// Sends a JSON object and reads one. A cancelled call closes the connection.
///
/// # Errors
/// See [`RequestError`]. Nothing is retried.
pub async fn send<B: Serialize, A: DeserializeOwned>(
    api: &Api,
    method: Method,
    path: &str,
    body: Option<&B>,
) -> Result<A, RequestError> {
    send_within(TIMEOUT, api, method, path, body).await
}

/// As [`send`], with a time limit of the caller.
///
/// # Errors
/// As [`send`].
pub(crate) async fn send_within<B: Serialize, A: DeserializeOwned>(
    limit: Duration,
    api: &Api,
    method: Method,
    path: &str,
    body: Option<&B>,
) -> Result<A, RequestError> {
    within(limit, answer(api, method, path, body, ANSWER_BYTES_MAX)).await
}

/// As [`send`], for an answer of at most `bytes_max`.
///
/// # Errors
/// As [`send`].
pub(crate) async fn get_at_most<A: DeserializeOwned>(
    bytes_max: usize,
    api: &Api,
    path: &str,
) -> Result<A, RequestError> {
    let answer = answer::<(), A>(api, Method::GET, path, None, bytes_max);
    within(TIMEOUT, answer).await
}

async fn within<T>(
    limit: Duration,
    request: impl Future<Output = Result<T, RequestError>>,
) -> Result<T, RequestError> {
    let answer = tokio::time::timeout(limit, request).await;
    answer.unwrap_or(Err(RequestError::TimedOut))
}

async fn answer<B: Serialize, A: DeserializeOwned>(
    api: &Api,
    method: Method,
    path: &str,
    body: Option<&B>,
    bytes_max: usize,
) -> Result<A, RequestError> {
    let body = begin(api, method, path, body).await?;
    let bytes = whole(body, bytes_max).await?;
    serde_json::from_slice(&bytes).map_err(not_understood)
}

/// JSON objects, one a line, as a watch sends them.
pub(crate) struct Lines {
    body: BodyDataStream<Body>,
    buffer: BytesMut,
    /// The line under way is too long; the rest of it is dropped.
    is_too_long: bool,
}

/// Begins to read lines. The caller of [`Lines::next`] decides how long to wait for each line.
///
/// # Errors
/// As [`send`].
pub(crate) async fn watch(api: &Api, path: &str) -> Result<Lines, RequestError> {
    let body = within(TIMEOUT, begin::<()>(api, Method::GET, path, None)).await?;
    Ok(Lines {
        body: BodyDataStream::new(body),
        buffer: BytesMut::new(),
        is_too_long: false,
    })
}

impl Lines {
    /// The next object, or why its line cannot be used: the lines after it can. `None` at the end.
    ///
    /// # Errors
    /// The connection broke.
    pub(crate) async fn next<A: DeserializeOwned>(
        &mut self,
    ) -> Result<Option<Result<A, RequestError>>, RequestError> {
        loop {
            if let Some(end) = self.buffer.iter().position(|byte| *byte == b'\n') {
                let line = self.buffer.split_to(end + 1);
                if std::mem::take(&mut self.is_too_long) {
                    return Ok(Some(Err(RequestError::TooLong(ANSWER_BYTES_MAX))));
                }
                if line.trim_ascii().is_empty() {
                    continue;
                }
                return Ok(Some(serde_json::from_slice(&line).map_err(not_understood)));
            }
            if self.is_too_long || self.buffer.len() > ANSWER_BYTES_MAX {
                self.is_too_long = true;
                self.buffer.clear();
            }
            match self.body.next().await {
                Some(Ok(bytes)) => self.buffer.extend_from_slice(&bytes),
                Some(Err(error)) => {
                    return Err(RequestError::Transport(excerpt(&error.to_string())));
                }
                None => return Ok(None),
            }
        }
    }
}

/// Sends a request; returns the body of the answer, unless it is a refusal.
async fn begin<B: Serialize>(
    api: &Api,
    method: Method,
    path: &str,
    body: Option<&B>,
) -> Result<Body, RequestError> {
    let client = api.client().await?;
    let bytes = match body {
        Some(body) => serde_json::to_vec(body).map_err(not_understood)?,
        None => Vec::new(),
    };
    let mut request = Request::builder()
        .method(method)
        .uri(path)
        .header(header::ACCEPT, "application/json");
    if body.is_some() {
        request = request.header(header::CONTENT_TYPE, "application/json");
    }
    let request = request
        .body(Body::from(bytes))
        .map_err(|error| RequestError::Transport(error.to_string()))?;
    let response = client
        .send(request)
        .await
        .map_err(|error| RequestError::Transport(plain(&error)))?;
    let status = response.status();
    let body = response.into_body();
    if status.is_success() {
        return Ok(body);
    }
    let bytes = whole(body, ANSWER_BYTES_MAX).await?;
    let said = serde_json::from_slice::<Status>(&bytes)
        .ok()
        .unwrap_or_default();
    let message = said
        .message
        .unwrap_or_else(|| status.canonical_reason().unwrap_or("refused").to_owned());
    Err(RequestError::Refused {
        status,
        reason: excerpt(&said.reason.unwrap_or_default()),
        message: excerpt(&message),
    })
}

async fn whole(body: Body, bytes_max: usize) -> Result<Bytes, RequestError> {
    let collected = Limited::new(body, bytes_max).collect().await;
    let collected = collected.map_err(|error| match error.downcast_ref::<LengthLimitError>() {
        Some(_) => RequestError::TooLong(bytes_max),
        None => RequestError::Transport(excerpt(&error.to_string())),
    })?;
    Ok(collected.to_bytes())
}

fn not_understood(error: serde_json::Error) -> RequestError {
    RequestError::NotUnderstood(excerpt(&error.to_string()))
}

/// The error without the layers of the library. The caller names the API server where strangers do not read it.
fn plain(error: &kube::Error) -> String {
    let why = words::of_connection(error);
    excerpt(&format!("cannot reach the API server: {why}"))
}

/// A value of a query.
pub(crate) fn escape(value: &str) -> String {
    let mut escaped = String::new();
    for byte in value.bytes() {
        // RFC 3986: all but the unreserved characters.
        if byte.is_ascii_alphanumeric() || b"-._~".contains(&byte) {
            escaped.push(char::from(byte));
        } else {
            escaped.push_str(&format!("%{byte:02X}"));
        }
    }
    escaped
}

/// What a page of a list says besides its items.
#[derive(Deserialize, Default)]
pub(crate) struct PageMeta {
    #[serde(rename = "resourceVersion")]
    pub(crate) version: Option<String>,
    /// Where the next page begins.
    #[serde(rename = "continue")]
    pub(crate) rest: Option<String>,
}

/// The start of a foreign text.
pub(crate) fn excerpt(text: &str) -> String {
    let mut end = text.len().min(TEXT_BYTES_MAX);
    while !text.is_char_boundary(end) {
        end -= 1;
    }
    let cut = if end < text.len() { "..." } else { "" };
    format!("{}{cut}", &text[..end])
}
