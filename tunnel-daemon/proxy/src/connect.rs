//! The client's side of HTTP/1.1 CONNECT (RFC 9110, section 9.3.6).

use std::io;
use std::time::Duration;

use adit_core::text::beginning;
use bytes::{Buf as _, Bytes, BytesMut};
use tokio::io::{AsyncRead, AsyncReadExt as _, AsyncWrite, AsyncWriteExt as _};

/// Octets of an answer's head, at most.
const HEAD_OCTETS_MAX: usize = 16 * 1024;
/// Header fields of an answer, at most.
const FIELDS_MAX: usize = 100;
/// Provisional answers that are passed over.
const PROVISIONAL_MAX: usize = 10;
/// Octets of a refusal's body that are read, and how long they are waited for.
const BODY_OCTETS_MAX: usize = 4 * 1024;
const BODY_WITHIN: Duration = Duration::from_secs(2);
/// Octets of a challenge, at most.
const CHALLENGE_OCTETS_MAX: usize = 200;
/// Octets asked for at once.
const READ_OCTETS: usize = 1024;

/// Why there is no tunnel.
#[derive(Debug, thiserror::Error)]
pub enum NoTunnel {
    /// The connection failed before a whole answer.
    #[error(transparent)]
    Io(#[from] io::Error),
    /// The target cannot be asked for.
    #[error("the target is no authority: write HOST:PORT")]
    Target,
    /// The connection ended before a whole answer.
    #[error("it closed the connection before it answered")]
    Closed,
    /// The answer is no HTTP/1.1, or too long.
    #[error("its answer is no HTTP: {0}")]
    NotHttp(&'static str),
    /// The other end refuses.
    #[error("it answered status {status}{}: {body}", asked_for(challenge))]
    Refused {
        /// Status code.
        status: u16,
        /// The first octets of the answer's body, as text.
        body: String,
        /// The fields `Proxy-Authenticate`, cut: the authentication that it asks for (RFC 9110, section 11.7.1).
        challenge: String,
    },
}

fn asked_for(challenge: &str) -> String {
    match challenge {
        "" => String::new(),
        challenge => format!(" and asks for {challenge}"),
    }
}

/// Asks for a tunnel to `target`, an authority; `authorization` is the value of `Proxy-Authorization`. Returns what the target
/// has sent already. A cancelled call leaves the connection unusable.
///
/// # Errors
/// See [`NoTunnel`].
pub async fn open_tunnel<S>(
    io: &mut S,
    target: &str,
    authorization: Option<&str>,
) -> Result<Bytes, NoTunnel>
where
    S: AsyncRead + AsyncWrite + Unpin,
{
    if target.is_empty() || target.bytes().any(|octet| !octet.is_ascii_graphic()) {
        return Err(NoTunnel::Target);
    }
    let authorization = authorization.map(|value| format!("Proxy-Authorization: {value}\r\n"));
    let authorization = authorization.unwrap_or_default();
    let request = format!("CONNECT {target} HTTP/1.1\r\nHost: {target}\r\n{authorization}\r\n");
    io.write_all(request.as_bytes()).await?;
    io.flush().await?;
    let (mut read, mut provisional) = (BytesMut::new(), 0);
    let head = loop {
        if let Some(head) = Head::parse(&read)? {
            read.advance(head.octets);
            // Provisional answers come before the one that counts.
            match head.status {
                101 => return Err(NoTunnel::NotHttp("it switches protocols unasked")),
                100..200 if provisional < PROVISIONAL_MAX => provisional += 1,
                100..200 => return Err(NoTunnel::NotHttp("it has too many provisional answers")),
                _ => break head,
            }
            continue;
        }
        if read.len() >= HEAD_OCTETS_MAX {
            return Err(NoTunnel::NotHttp("its head is too long"));
        }
        read.reserve(READ_OCTETS);
        if io.read_buf(&mut read).await? == 0 {
            return Err(NoTunnel::Closed);
        }
    };
    if (200..300).contains(&head.status) {
        // A copy: the tunnel may live for days, and these bytes keep the memory of the head alive.
        return Ok(Bytes::copy_from_slice(&read));
    }
    let body = rest_of(io, &mut read, head.length);
    let _slow = tokio::time::timeout(BODY_WITHIN, body).await;
    let length = usize::try_from(head.length).unwrap_or(usize::MAX);
    read.truncate(length.min(BODY_OCTETS_MAX));
    Err(NoTunnel::Refused {
        status: head.status,
        body: String::from_utf8_lossy(&read).into_owned(),
        challenge: head.challenge,
    })
}

/// Reads a body of `length` octets, to the end of the connection at most.
async fn rest_of<S: AsyncRead + Unpin>(io: &mut S, read: &mut BytesMut, length: u64) {
    while read.len() < BODY_OCTETS_MAX && (read.len() as u64) < length {
        read.reserve(READ_OCTETS);
        if !matches!(io.read_buf(read).await, Ok(1..)) {
            return;
        }
    }
}

/// The head of an answer.
struct Head {
    status: u16,
    /// Of its body: to the end of the connection where the head does not say, and none where it is cut into chunks.
    length: u64,
    octets: usize,
    challenge: String,
}

impl Head {
    /// `None`: more is needed.
    fn parse(bytes: &[u8]) -> Result<Option<Self>, NoTunnel> {
        let mut fields = [httparse::EMPTY_HEADER; FIELDS_MAX];
        let mut response = httparse::Response::new(&mut fields);
        let mut config = httparse::ParserConfig::default();
        // Seen in the field (RFC 9112, section 5.2).
        config.allow_obsolete_multiline_headers_in_responses(true);
        let parsed = config.parse_response(&mut response, bytes);
        let parsed = parsed.map_err(|error| {
            NoTunnel::NotHttp(match error {
                httparse::Error::Version => "it is no HTTP/1.1",
                httparse::Error::TooManyHeaders => "it has too many header fields",
                httparse::Error::Status => "its status is no number",
                _ => "its head is malformed",
            })
        })?;
        let httparse::Status::Complete(octets) = parsed else {
            return Ok(None);
        };
        let value = |name: &str| {
            let mut fields = response.headers.iter();
            let field = fields.find(|field| field.name.eq_ignore_ascii_case(name))?;
            std::str::from_utf8(field.value).ok()
        };
        let challenge = response.headers.iter();
        let challenge =
            challenge.filter(|field| field.name.eq_ignore_ascii_case("proxy-authenticate"));
        let challenge: Vec<_> = challenge
            .map(|field| field.value.escape_ascii().to_string())
            .collect();
        let length = match value("transfer-encoding") {
            Some(_chunked) => Some(0),
            None => value("content-length").and_then(|value| value.trim().parse().ok()),
        };
        Ok(Some(Self {
            status: response.code.unwrap_or_default(),
            length: length.unwrap_or(u64::MAX),
            octets,
            challenge: beginning(&challenge.join(", "), CHALLENGE_OCTETS_MAX).to_owned(),
        }))
    }
}

/// For the fuzz target and the test that replays its corpus.
///
/// # Panics
/// When the outcome of a head depends on how much of the input has come.
#[doc(hidden)]
pub fn fuzz_entry(data: &[u8]) {
    let whole = Head::parse(data);
    for end in 0..data.len().min(512) {
        let cut = data.get(..end).unwrap_or_default();
        if let Ok(Some(head)) = Head::parse(cut) {
            let Ok(Some(all)) = &whole else {
                panic!("more octets undo a whole head");
            };
            assert_eq!(
                (head.status, head.length, head.octets),
                (all.status, all.length, all.octets)
            );
            assert!(head.octets <= end, "a head is longer than its octets");
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const REQUEST: &[u8; 41] = b"CONNECT web:80 HTTP/1.1\r\nHost: web:80\r\n\r\n";

    /// What comes of `answer`, which the other end writes in two pieces, split at `at`.
    async fn asked(answer: &[u8], at: usize) -> Result<Bytes, NoTunnel> {
        let (mut near, mut far) = tokio::io::duplex(64 * 1024);
        let (first, second) = answer.split_at(at.min(answer.len()));
        let (first, second) = (first.to_vec(), second.to_vec());
        let other = async move {
            let mut request = [0; REQUEST.len()];
            far.read_exact(&mut request).await.unwrap();
            assert_eq!(&request, REQUEST);
            far.write_all(&first).await.unwrap();
            tokio::task::yield_now().await;
            far.write_all(&second).await.unwrap();
        };
        let (outcome, ()) = tokio::join!(open_tunnel(&mut near, "web:80", None), other);
        outcome
    }

    #[tokio::test]
    async fn every_2xx_opens_the_tunnel_and_keeps_what_comes_behind() {
        for head in [
            "HTTP/1.1 200 Connection Established\r\n\r\n",
            "HTTP/1.0 200 OK\r\nVia: x\r\n\r\n",
            "HTTP/1.1 201\r\nContent-Length: 3\r\n\r\n",
            "HTTP/1.1 200 odd\r\nX: a\r\n b\r\n\r\n",
            "HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 103 Early\r\nLink: x\r\n\r\nHTTP/1.1 200 OK\r\n\r\n",
            "HTTP/1.1 200 OK\n\n",
        ] {
            let answer = [head.as_bytes(), b"SSH-2.0"].concat();
            for at in 0..answer.len() {
                let early = asked(&answer, at).await.unwrap();
                assert!(b"SSH-2.0".starts_with(&early), "{head:?} {at} {early:?}");
            }
        }
    }

    #[tokio::test]
    async fn a_refusal_has_status_and_text_whatever_ends_its_body() {
        for (answer, status, text) in [
            (
                "HTTP/1.1 502 Bad Gateway\r\n\r\ndial: connection refused",
                502,
                "dial: connection refused",
            ),
            (
                "HTTP/1.1 403 No\r\nContent-Length: 4\r\n\r\nnope and more",
                403,
                "nope",
            ),
            (
                "HTTP/1.1 502 No\r\nTransfer-Encoding: chunked\r\n\r\n4\r\nnope\r\n0\r\n\r\n",
                502,
                "",
            ),
            (
                "HTTP/1.1 407 Proxy Authentication Required\r\nContent-Length: 0\r\n\r\n",
                407,
                "",
            ),
        ] {
            for at in 0..answer.len() {
                match asked(answer.as_bytes(), at).await {
                    Err(NoTunnel::Refused {
                        status: told, body, ..
                    }) => {
                        assert_eq!((told, &*body), (status, text), "{at}");
                    }
                    other => panic!("{answer:?} {other:?}"),
                }
            }
        }
    }

    #[tokio::test]
    async fn the_challenge_of_a_proxy_is_quoted() {
        let answer = "HTTP/1.1 407 Who?\r\nProxy-Authenticate: Negotiate\r\nproxy-authenticate: Basic realm=\"a\u{e9}b\"\r\nContent-Length: 0\r\n\r\n";
        let error = asked(answer.as_bytes(), 9).await.unwrap_err().to_string();
        assert!(
            error.contains(r#"407 and asks for Negotiate, Basic realm=\"a\xc3\xa9b\""#),
            "{error}"
        );
        let long = "x".repeat(1000);
        let answer = format!("HTTP/1.1 407 Who?\r\nProxy-Authenticate: {long}\r\n\r\n");
        let error = asked(answer.as_bytes(), 9).await.unwrap_err().to_string();
        assert!(error.len() < 300, "{error}");
    }

    #[tokio::test]
    async fn a_target_that_would_break_the_request_is_not_asked_for() {
        let (mut near, _far) = tokio::io::duplex(64);
        for target in ["", "a b:80", "a:80\r\nX: y", "\u{e9}:80"] {
            let outcome = open_tunnel(&mut near, target, None).await;
            assert!(matches!(outcome, Err(NoTunnel::Target)), "{target:?}");
        }
    }

    #[tokio::test]
    async fn no_answer_and_no_http_are_told_apart() {
        let long = format!("HTTP/1.1 200 OK\r\nX: {}", "x".repeat(HEAD_OCTETS_MAX));
        for (answer, text) in [
            ("", "closed"),
            ("HTTP/1.1 200 OK\r\n", "closed"),
            ("SSH-2.0-OpenSSH_9\r\n", "no HTTP"),
            ("HTTP/1.1 2xx OK\r\n\r\n", "no HTTP"),
            ("HTTP/1.1 101 Switching Protocols\r\n\r\n", "no HTTP"),
            (&"HTTP/1.1 100 Continue\r\n\r\n".repeat(11), "no HTTP"),
            ("HTTP/1.1 200 OK\r\nno field\r\n\r\n", "no HTTP"),
            (&long, "no HTTP"),
        ] {
            let error = asked(answer.as_bytes(), 7).await.unwrap_err();
            assert!(error.to_string().contains(text), "{answer:.40} {error}");
        }
    }
}
