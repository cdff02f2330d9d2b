//! Answers of the proxy itself: a status, its cause as text, and as `Proxy-Status` (RFC 9209).

use adit_core::connect::TargetStatus;
use adit_core::failure::{DialFailure, TargetFailure};
use adit_core::text::Excerpt;
use bytes::Bytes;
use http::header::{CONNECTION, CONTENT_TYPE, HeaderName, HeaderValue, PROXY_AUTHENTICATE};
use http::{Response, StatusCode};
use http_body_util::Full;

const PROXY_STATUS: HeaderName = HeaderName::from_static("proxy-status");

/// Why the proxy answers in place of a target.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
#[error("{text}")]
pub struct Refusal {
    status: StatusCode,
    /// Type of the error in `Proxy-Status`.
    error: &'static str,
    text: String,
}

impl Refusal {
    fn new(status: StatusCode, error: &'static str, text: impl Into<String>) -> Self {
        let text = text.into();
        Self {
            status,
            error,
            text,
        }
    }

    /// The request is wrong.
    pub(super) fn request(text: &'static str) -> Self {
        Self::new(StatusCode::BAD_REQUEST, "http_request_error", text)
    }

    pub(super) fn method(text: &'static str) -> Self {
        Self::new(StatusCode::METHOD_NOT_ALLOWED, "http_request_denied", text)
    }

    pub(super) fn looped() -> Self {
        let text = "the request came through this proxy before: a target, or a proxy behind it, leads back here";
        Self::new(StatusCode::BAD_GATEWAY, "proxy_loop_detected", text)
    }

    /// Not a failure: the last proxy that the client allows answers.
    pub(super) fn last_proxy() -> Self {
        Self::new(
            StatusCode::OK,
            "",
            "this is the last proxy that Max-Forwards allows",
        )
    }

    /// The client must say who it is.
    #[must_use]
    pub fn unauthenticated() -> Self {
        let text = "this proxy asks for a user and a password";
        Self::new(
            StatusCode::PROXY_AUTHENTICATION_REQUIRED,
            "http_request_denied",
            text,
        )
    }

    /// The target broke the connection off before its response was complete.
    pub(super) fn no_response(cause: &hyper::Error) -> Self {
        let error = if cause.is_parse() {
            "http_protocol_error"
        } else {
            "http_response_incomplete"
        };
        let text = format!("the target sent no response: {cause}");
        Self::new(StatusCode::BAD_GATEWAY, error, text)
    }

    /// The target's response can be read in more than one way.
    pub(super) fn response_framing() -> Self {
        let text = "the target's response has an unclear length";
        Self::new(StatusCode::BAD_GATEWAY, "http_protocol_error", text)
    }

    pub(super) fn unasked_upgrade() -> Self {
        let text = "the target switched protocols without being asked";
        Self::new(StatusCode::BAD_GATEWAY, "http_upgrade_failed", text)
    }

    /// The response of the proxy. `has_body`: the request has one, which may not have been read to its end.
    pub(super) fn response(&self, has_body: bool) -> Response<Full<Bytes>> {
        let mut response = Response::new(Full::from(format!("{}\n", self.text)));
        *response.status_mut() = self.status;
        let headers = response.headers_mut();
        headers.insert(
            CONTENT_TYPE,
            HeaderValue::from_static("text/plain; charset=utf-8"),
        );
        if let Ok(cause) = HeaderValue::try_from(format!("adit; error={}", self.error))
            && !self.error.is_empty()
        {
            headers.insert(PROXY_STATUS, cause);
        }
        if has_body || self.status == StatusCode::BAD_REQUEST {
            // What follows may be the rest of the request.
            headers.insert(CONNECTION, HeaderValue::from_static("close"));
        }
        if self.status == StatusCode::PROXY_AUTHENTICATION_REQUIRED {
            headers.insert(
                PROXY_AUTHENTICATE,
                HeaderValue::from_static("Basic realm=\"adit\""),
            );
        }
        response
    }
}

impl From<&DialFailure> for Refusal {
    fn from(failure: &DialFailure) -> Self {
        let text = Excerpt(&failure.to_string()).to_string();
        let (status, error) = match failure {
            DialFailure::Denied(_) => (StatusCode::FORBIDDEN, "http_request_denied"),
            DialFailure::Target(text) => of_answer(text),
            DialFailure::TimedOut | DialFailure::SendTimedOut => {
                (StatusCode::GATEWAY_TIMEOUT, "connection_timeout")
            }
            DialFailure::LinkLost | DialFailure::Closed => {
                (StatusCode::BAD_GATEWAY, "connection_terminated")
            }
            DialFailure::TooManyPending { .. } => {
                (StatusCode::SERVICE_UNAVAILABLE, "connection_limit_reached")
            }
            DialFailure::TooLong => (StatusCode::BAD_REQUEST, "http_request_error"),
            DialFailure::NoAgent | DialFailure::LinkBusy | DialFailure::NoServer(_) => {
                (StatusCode::SERVICE_UNAVAILABLE, "destination_unavailable")
            }
            DialFailure::ShuttingDown | DialFailure::NoMemory | DialFailure::NoDescriptors => {
                (StatusCode::SERVICE_UNAVAILABLE, "proxy_internal_error")
            }
        };
        Self::new(status, error, text)
    }
}

/// Status and error of an agent's text.
fn of_answer(text: &str) -> (StatusCode, &'static str) {
    let status = match TargetStatus::of(text) {
        TargetStatus::BadGateway => StatusCode::BAD_GATEWAY,
        TargetStatus::ServiceUnavailable => StatusCode::SERVICE_UNAVAILABLE,
        TargetStatus::GatewayTimeout => StatusCode::GATEWAY_TIMEOUT,
    };
    match TargetFailure::of(text) {
        TargetFailure::Denied => (StatusCode::FORBIDDEN, "destination_ip_prohibited"),
        TargetFailure::NoSuchHost | TargetFailure::Lookup => (status, "dns_error"),
        TargetFailure::LookupTimedOut => (status, "dns_timeout"),
        TargetFailure::Refused => (status, "connection_refused"),
        TargetFailure::TimedOut => (status, "connection_timeout"),
        TargetFailure::HostUnreachable | TargetFailure::NetworkUnreachable => {
            (status, "destination_ip_unroutable")
        }
        TargetFailure::Overload => (status, "connection_limit_reached"),
        TargetFailure::Stopping | TargetFailure::Connect | TargetFailure::Other => {
            (status, "destination_unavailable")
        }
    }
}
