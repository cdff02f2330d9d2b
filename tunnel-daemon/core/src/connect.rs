//! The HTTP-CONNECT request head: an incremental parser with limits, and every response of that dialect.
//!
//! The parser accepts what Go's `net/http` server accepts, because clients are tested against that server. Two rules are
//! stricter; no client of the proxy depends on them. The request target must be an authority only (Go drops user names and
//! paths silently). Percent escapes are allowed only in IPv6 zones (Go also decodes them in names). The destination is
//! passed on unchanged, with its zone decoded; the agent checks it.

mod reply;

#[cfg(test)]
mod tests;

pub use reply::{ESTABLISHED, Rejection, TargetStatus, failure_of, failure_response};

/// Default limit of a request head, octets: the limit of Go's server.
pub const HEAD_LEN_MAX: usize = 1024 * 1024;
/// Octets kept of a `User-Agent`, which is only logged.
const USER_AGENT_LEN_MAX: usize = 256;

/// What [`RequestHead::parse`] found.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Progress {
    /// The head is incomplete: read more and call again.
    NeedMore,
    /// A request for a tunnel.
    Connect(Connect),
    /// Not a tunnel request: write [`Rejection::response`] and close.
    Rejected(Rejection),
}

/// A request for a tunnel.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Connect {
    /// The request target, verbatim; usually `host:port`. `Host` headers are ignored.
    pub authority: String,
    /// The first 256 octets of the first `User-Agent`, for the log.
    pub user_agent: Option<String>,
    /// Octets of the head. The buffer's bytes after the head are the tunnel's first data.
    pub consumed: usize,
}

/// The parser of one request head.
#[derive(Debug)]
pub struct RequestHead {
    len_max: usize,
    /// Octets already scanned, so that each octet is scanned once.
    scanned: usize,
    /// Where the current line starts.
    line_start: usize,
    /// The request line, once parsed.
    request: Option<Request>,
    user_agent: Option<String>,
}

impl Default for RequestHead {
    fn default() -> Self {
        Self::new(HEAD_LEN_MAX)
    }
}

impl RequestHead {
    /// A parser that refuses heads of more than `len_max` octets.
    #[must_use]
    pub fn new(len_max: usize) -> Self {
        Self {
            len_max,
            scanned: 0,
            line_start: 0,
            request: None,
            user_agent: None,
        }
    }

    /// Parses all bytes read so far: on every call `bytes` starts with the head's first octet and only grows. After any
    /// result but [`Progress::NeedMore`] the parser must not be used again.
    pub fn parse(&mut self, bytes: &[u8]) -> Progress {
        // The limit covers the head only; any amount of data may follow the head.
        let bound = bytes.len().min(self.len_max);
        while let Some(&octet) = bytes.get(self.scanned).filter(|_| self.scanned < bound) {
            self.scanned += 1;
            if octet != b'\n' {
                // Go rejects control octets only at the end of the line; a TLS ClientHello sent to this port may never
                // contain a line end.
                if is_control(octet) && octet != b'\r' {
                    return Progress::Rejected(Rejection::Malformed);
                }
                continue;
            }
            let line = bytes.get(self.line_start..self.scanned).unwrap_or_default();
            self.line_start = self.scanned;
            match self.handle_line(without_line_end(line)) {
                Ok(None) => {}
                Ok(Some(done)) => return done,
                Err(rejection) => return Progress::Rejected(rejection),
            }
        }
        if bytes.len() >= self.len_max {
            return Progress::Rejected(Rejection::TooLarge);
        }
        Progress::NeedMore
    }

    fn handle_line(&mut self, line: &[u8]) -> Result<Option<Progress>, Rejection> {
        if line.contains(&b'\r') {
            return Err(Rejection::Malformed);
        }
        let Some(request) = self.request.take() else {
            self.request = Some(Request::parse(line)?);
            return Ok(None);
        };
        if line.is_empty() {
            let authority = request.into_authority()?;
            let user_agent = self.user_agent.take();
            let connect = Connect {
                authority,
                user_agent,
                consumed: self.scanned,
            };
            return Ok(Some(Progress::Connect(connect)));
        }
        let is_first = request.headers == 0;
        self.request = Some(Request {
            headers: request.headers.saturating_add(1),
            ..request
        });
        if matches!(line.first(), Some(b' ' | b'\t')) {
            // An obsolete folded line continues the previous header, so it cannot be the first.
            return if is_first {
                Err(Rejection::Malformed)
            } else {
                Ok(None)
            };
        }
        let (name, value) = header(line).ok_or(Rejection::Malformed)?;
        if name.eq_ignore_ascii_case(b"user-agent") && self.user_agent.is_none() {
            let kept = value.get(..USER_AGENT_LEN_MAX).unwrap_or(value);
            self.user_agent = Some(String::from_utf8_lossy(kept).into_owned());
        }
        Ok(None)
    }
}

/// A request line, and the number of header lines after it.
#[derive(Debug)]
struct Request {
    is_connect: bool,
    target: String,
    is_http_1: bool,
    headers: usize,
}

impl Request {
    /// Parses `METHOD target HTTP/x.y` with single spaces, as Go does.
    fn parse(line: &[u8]) -> Result<Self, Rejection> {
        let line = std::str::from_utf8(line).map_err(|_not_text| Rejection::Malformed)?;
        let (method, rest) = line.split_once(' ').ok_or(Rejection::Malformed)?;
        let (target, version) = rest.split_once(' ').ok_or(Rejection::Malformed)?;
        if method.is_empty() || !method.bytes().all(is_token) || target.is_empty() {
            return Err(Rejection::Malformed);
        }
        if target.contains('\t') {
            return Err(Rejection::Malformed);
        }
        let is_http_1 = match version.strip_prefix("HTTP/").map(str::as_bytes) {
            Some([major, b'.', minor]) if minor.is_ascii_digit() && major.is_ascii_digit() => {
                *major == b'1'
            }
            _ => return Err(Rejection::Malformed),
        };
        Ok(Self {
            is_connect: method == "CONNECT",
            target: target.to_owned(),
            is_http_1,
            headers: 0,
        })
    }

    /// The verdict on a complete head. An earlier answer could reach a client that still writes as a connection reset.
    fn into_authority(self) -> Result<String, Rejection> {
        if !self.is_http_1 {
            return Err(Rejection::VersionUnsupported);
        }
        if !self.is_connect {
            return Err(Rejection::NotConnect);
        }
        match zone_of(&self.target) {
            None if is_authority(&self.target) => Ok(self.target),
            Some((before, zone, behind)) if is_authority(&format!("{before}{behind}")) => {
                let zone = unescape_zone(zone).ok_or(Rejection::Malformed)?;
                Ok(format!("{before}%{zone}{behind}"))
            }
            None | Some(_) => Err(Rejection::Malformed),
        }
    }
}

/// Splits a bracketed address at its zone (RFC 6874): `[fe80::1`, `eth0`, `]:80`. `None` without a zone.
fn zone_of(target: &str) -> Option<(&str, &str, &str)> {
    let end = target.strip_prefix('[')?.rfind(']')? + 1;
    let (inside, behind) = target.split_at_checked(end)?;
    let (before, zone) = inside.split_once("%25")?;
    Some((before, zone, behind))
}

/// As in Go, percent escapes may encode host octets, a space and the percent sign.
fn unescape_zone(zone: &str) -> Option<String> {
    let (mut octets, mut rest) = (Vec::with_capacity(zone.len()), zone.as_bytes());
    while let [octet, behind @ ..] = rest {
        rest = behind;
        if *octet != b'%' {
            octets.push(is_host_octet(*octet).then_some(*octet)?);
            continue;
        }
        let [high, low, behind @ ..] = rest else {
            return None;
        };
        rest = behind;
        let digit = |octet: u8| char::from(octet).to_digit(16);
        let escaped = u8::try_from(digit(*high)? << 4 | digit(*low)?).ok()?;
        let is_allowed = is_host_octet(escaped) || escaped == b' ' || escaped == b'%';
        octets.push(is_allowed.then_some(escaped)?);
    }
    String::from_utf8(octets).ok()
}

/// Whether Go's `url.Parse` would accept `target` as a host with an optional port.
fn is_authority(target: &str) -> bool {
    let after_host = match target.strip_prefix('[') {
        Some(bracketed) => match bracketed.rsplit_once(']') {
            Some((_, after)) => after,
            None => return false,
        },
        None => target
            .rfind(':')
            .and_then(|colon| target.get(colon..))
            .unwrap_or_default(),
    };
    let is_port = |port: &str| port.bytes().all(|octet| octet.is_ascii_digit());
    target.bytes().all(is_host_octet)
        && (after_host.is_empty() || after_host.strip_prefix(':').is_some_and(is_port))
}

/// Octets that Go allows in a host, except the percent sign. Non-ASCII octets are left to the resolver.
fn is_host_octet(octet: u8) -> bool {
    octet.is_ascii_alphanumeric() || octet >= 0x80 || b"-_.~!$&'()*+,;=:[]<>\"".contains(&octet)
}

/// Name and trimmed value of a header line; `None` if Go's server refuses the line.
fn header(line: &[u8]) -> Option<(&[u8], &[u8])> {
    let colon = line.iter().position(|&octet| octet == b':')?;
    let (name, value) = (line.get(..colon)?, line.get(colon + 1..)?);
    (!name.is_empty() && name.iter().copied().all(is_token)).then(|| (name, value.trim_ascii()))
}

/// The line without its LF or CRLF.
fn without_line_end(line: &[u8]) -> &[u8] {
    let line = line.strip_suffix(b"\n").unwrap_or(line);
    line.strip_suffix(b"\r").unwrap_or(line)
}

/// Control octets, except tab, which header values may contain.
fn is_control(octet: u8) -> bool {
    octet.is_ascii_control() && octet != b'\t'
}

/// RFC 9110, section 5.6.2.
fn is_token(octet: u8) -> bool {
    octet.is_ascii_alphanumeric() || b"!#$%&'*+-.^_`|~".contains(&octet)
}

/// For the fuzz target and the test that replays its corpus. The first byte sets the chunk size of the rest.
///
/// # Panics
///
/// When the outcome depends on the chunk size, or the parser reports more octets than the input has.
#[doc(hidden)]
pub fn fuzz_entry(data: &[u8]) {
    let [cut, head @ ..] = data else { return };
    let whole = RequestHead::new(512).parse(head);
    let mut parser = RequestHead::new(512);
    let mut pieces = Progress::NeedMore;
    let step = usize::from(*cut) + 1;
    for end in (step..head.len()).step_by(step).chain([head.len()]) {
        pieces = parser.parse(head.get(..end).unwrap_or_default());
        if pieces != Progress::NeedMore {
            break;
        }
    }
    assert_eq!(whole, pieces, "the outcome depends on how the input is cut");
    match whole {
        Progress::NeedMore => assert!(head.len() < 512, "the limit was not applied"),
        Progress::Connect(found) => {
            assert!(
                found.consumed <= head.len() && !found.authority.is_empty(),
                "{found:?}"
            );
        }
        Progress::Rejected(rejection) => assert!(rejection.response().starts_with(b"HTTP/1.1 ")),
    }
}
