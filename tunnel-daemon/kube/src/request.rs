//! One request to the API server, bounded in time and size.

use std::time::Duration;

use http::{Method, Request, StatusCode, header};
use http_body_util::{BodyExt as _, LengthLimitError, Limited};
use kube::client::Body;
use serde::{Deserialize, Serialize, de::DeserializeOwned};

use crate::access::{AccessError, Api, chain};

/// Time for a request, with the connection it may need.
pub const TIMEOUT: Duration = Duration::from_secs(10);
/// Longest answer that is read.
const ANSWER_BYTES_MAX: usize = 1 << 20;
/// Longest part of a foreign error text that is passed on.
const TEXT_BYTES_MAX: usize = 512;

/// Why a request has no usable answer.
#[derive(Clone, Debug, thiserror::Error)]
pub enum RequestError {
    /// The configuration cannot be used.
    #[error(transparent)]
    Access(#[from] AccessError),
    /// No connection, or it broke.
    #[error("{0}")]
    Transport(String),
    /// The API server says no.
    #[error("{message} (HTTP status {status})", status = .status.as_u16())]
    Refused {
        /// HTTP status.
        status: StatusCode,
        /// In the words of the API server, if it has any.
        message: String,
    },
    /// It answers something else.
    #[error("the API server's answer is not what was asked for: {0}")]
    NotUnderstood(String),
    /// It answers without end.
    #[error("the API server's answer is longer than {} bytes", ANSWER_BYTES_MAX)]
    TooLong,
    /// It does not answer.
    #[error("no answer from the API server within {} s", TIMEOUT.as_secs())]
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
}

/// What the API server says in place of an object.
#[derive(Deserialize)]
struct Status {
    message: Option<String>,
}

/// Sends a JSON object and reads one. A cancelled call closes the connection.
///
/// # Errors
/// See [`RequestError`]. Nothing is tried again.
pub async fn send<B: Serialize, A: DeserializeOwned>(
    api: &Api,
    method: Method,
    path: &str,
    body: Option<&B>,
) -> Result<A, RequestError> {
    let answer = async {
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
        let bytes = Limited::new(response.into_body(), ANSWER_BYTES_MAX)
            .collect()
            .await
            .map_err(|error| match error.downcast_ref::<LengthLimitError>() {
                Some(_) => RequestError::TooLong,
                None => RequestError::Transport(excerpt(&error.to_string())),
            })?
            .to_bytes();
        if !status.is_success() {
            let said = serde_json::from_slice::<Status>(&bytes).ok();
            let message = said
                .and_then(|status| status.message)
                .unwrap_or_else(|| status.canonical_reason().unwrap_or("refused").to_owned());
            return Err(RequestError::Refused {
                status,
                message: excerpt(&message),
            });
        }
        serde_json::from_slice(&bytes).map_err(not_understood)
    };
    tokio::time::timeout(TIMEOUT, answer)
        .await
        .unwrap_or(Err(RequestError::TimedOut))
}

fn not_understood(error: serde_json::Error) -> RequestError {
    RequestError::NotUnderstood(excerpt(&error.to_string()))
}

/// Without the names that the library gives its layers.
fn plain(error: &kube::Error) -> String {
    let text = match error {
        kube::Error::Service(cause) => chain(cause.as_ref()),
        kube::Error::HyperError(cause) => chain(cause),
        kube::Error::Auth(cause) => chain(cause),
        other => chain(other),
    };
    excerpt(&text)
}

/// The start of a text from outside.
fn excerpt(text: &str) -> String {
    let mut end = text.len().min(TEXT_BYTES_MAX);
    while !text.is_char_boundary(end) {
        end -= 1;
    }
    let cut = if end < text.len() { "..." } else { "" };
    format!("{}{cut}", &text[..end])
}
