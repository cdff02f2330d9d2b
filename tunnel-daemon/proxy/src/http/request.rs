//! What a request asks for, and the request that its target gets.
//!
//! A target gets one request that reads one way only: in origin form, with the `Host` of the request target, with one
//! `Content-Length` or chunked, and without what concerns the connection to this proxy.

use std::net::Ipv6Addr;

use adit_core::target::{Target, is_host_name};
use http::header::{
    CONNECTION, CONTENT_LENGTH, HOST, HeaderMap, HeaderName, HeaderValue, PROXY_AUTHENTICATE,
    PROXY_AUTHORIZATION, TE, TRANSFER_ENCODING, UPGRADE, VIA,
};
use http::uri::{Authority, PathAndQuery, Scheme};
use http::{Method, Uri, Version, request, response};

use super::Refusal;
use super::serve::Parent;

/// Headers of one connection that RFC 9110 and older clients know (section 7.6.1), beside those that `Connection` names.
const OF_ONE_CONNECTION: [HeaderName; 6] = [
    CONNECTION,
    HeaderName::from_static("keep-alive"),
    HeaderName::from_static("proxy-connection"),
    TE,
    TRANSFER_ENCODING,
    UPGRADE,
];
const MAX_FORWARDS: HeaderName = HeaderName::from_static("max-forwards");
/// Port of `http` URIs.
const HTTP_PORT: u16 = 80;

/// What a client asks for.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(super) enum Asked {
    /// A tunnel to `host:port`.
    Tunnel(String),
    /// A request to `host:port`.
    Request(String),
}

/// Reads what the client asks for, and refuses requests that could be read in more than one way.
///
/// # Errors
/// What is wrong, as an answer to the client.
pub(super) fn asked(request: &request::Parts) -> Result<Asked, Refusal> {
    framing(request)?;
    if request.method == Method::CONNECT {
        if has_body(request) {
            return Err(Refusal::request("CONNECT has no body"));
        }
        return tunnel(&request.uri).map(Asked::Tunnel);
    }
    if request.method == Method::TRACE {
        return Err(Refusal::method(
            "TRACE is not served: it would show a request's secrets",
        ));
    }
    let Some(authority) = request.uri.authority() else {
        return Err(Refusal::request(
            "this is a proxy: write the whole URL in the request line, as clients do that are told of a proxy",
        ));
    };
    if request.uri.scheme() != Some(&Scheme::HTTP) {
        return Err(Refusal::request(
            "only http:// URLs are requested here: ask for any other by CONNECT, through which TLS stays yours",
        ));
    }
    target(authority, Some(HTTP_PORT)).map(Asked::Request)
}

fn tunnel(uri: &Uri) -> Result<String, Refusal> {
    match uri.authority() {
        Some(authority) if uri.scheme().is_none() && uri.path_and_query().is_none() => {
            target(authority, None)
        }
        _ => Err(Refusal::request("CONNECT needs host:port and nothing else")),
    }
}

/// `host:port` of an authority, with the default port if it has none.
fn target(authority: &Authority, default: Option<u16>) -> Result<String, Refusal> {
    let text = authority.as_str();
    if text.contains('@') {
        // It would be lost, and could be meant for the target or for this proxy.
        return Err(Refusal::request(
            "user and password do not belong into the URL: send them as Authorization or Proxy-Authorization",
        ));
    }
    let host = authority.host();
    let is_host = match host
        .strip_prefix('[')
        .and_then(|host| host.strip_suffix(']'))
    {
        Some(address) => address.parse::<Ipv6Addr>().is_ok(),
        None => is_host_name(host),
    };
    if !is_host {
        return Err(Refusal::request(
            "the host is neither a name nor an address",
        ));
    }
    let port = text.get(host.len()..).unwrap_or_default();
    let port = match (port.strip_prefix(':'), default) {
        (Some(digits), _) if !digits.is_empty() => {
            let port = digits
                .bytes()
                .all(|digit| digit.is_ascii_digit())
                .then(|| digits.parse().ok());
            port.flatten().filter(|port| *port != 0)
        }
        (_, default) => default,
    };
    let Some(port) = port else {
        return Err(Refusal::request("the port is missing, or not 1 to 65535"));
    };
    Ok(format!("{host}:{port}"))
}

/// Whether the request says that it has a body.
fn has_body(request: &request::Parts) -> bool {
    let headers = &request.headers;
    headers.contains_key(TRANSFER_ENCODING)
        || headers
            .get(CONTENT_LENGTH)
            .is_some_and(|length| length != "0")
}

/// Refuses a body whose length two readers could take for different (RFC 9112, section 6.3), and two hosts.
fn framing(request: &request::Parts) -> Result<(), Refusal> {
    let headers = &request.headers;
    let many = |name: &HeaderName| headers.get_all(name).iter().count();
    if many(&HOST) > 1 {
        return Err(Refusal::request("more than one Host"));
    }
    let lengths = many(&CONTENT_LENGTH);
    if lengths > 1
        || headers
            .get(CONTENT_LENGTH)
            .is_some_and(|value| !is_number(value))
    {
        return Err(Refusal::request("Content-Length must be one number"));
    }
    let Some(coding) = headers.get(TRANSFER_ENCODING) else {
        return Ok(());
    };
    if lengths > 0 {
        return Err(Refusal::request(
            "Content-Length and Transfer-Encoding exclude each other",
        ));
    }
    if many(&TRANSFER_ENCODING) > 1
        || !coding.as_bytes().eq_ignore_ascii_case(b"chunked")
        || request.version != Version::HTTP_11
    {
        return Err(Refusal::request(
            "Transfer-Encoding may be chunked and nothing else, in HTTP/1.1",
        ));
    }
    Ok(())
}

fn is_number(value: &HeaderValue) -> bool {
    let octets = value.as_bytes();
    !octets.is_empty() && octets.iter().all(u8::is_ascii_digit)
}

/// Refuses a response that its reader could end elsewhere than this proxy does.
///
/// # Errors
/// What the client is answered.
pub(super) fn response_framing(response: &mut response::Parts) -> Result<(), Refusal> {
    let headers = &mut response.headers;
    let mut lengths = headers.get_all(CONTENT_LENGTH).iter();
    let (first, second) = (lengths.next(), lengths.next());
    if second.is_some() || first.is_some_and(|length| !is_number(length)) {
        return Err(Refusal::response_framing());
    }
    let mut codings = headers.get_all(TRANSFER_ENCODING).iter();
    match (codings.next(), codings.next()) {
        (None, _) => return Ok(()),
        (Some(coding), None)
            if coding.as_bytes().eq_ignore_ascii_case(b"chunked")
                && response.version == Version::HTTP_11 => {}
        _ => return Err(Refusal::response_framing()),
    }
    // The coding counts (RFC 9112, section 6.3).
    headers.remove(CONTENT_LENGTH);
    Ok(())
}

/// Turns the client's request into that of `target`. `via` names this proxy. Returns whether the client asks for an upgrade.
///
/// # Errors
/// The request came through this proxy before, or may not be forwarded.
pub(super) fn for_target(
    request: &mut request::Parts,
    target: &str,
    via: &HeaderValue,
) -> Result<bool, Refusal> {
    let mut came_by = request.headers.get_all(VIA).iter();
    if came_by.any(|passed| contains(passed.as_bytes(), via.as_bytes())) {
        return Err(Refusal::looped());
    }
    max_forwards(request)?;
    let host = HeaderValue::from_str(target.strip_suffix(":80").unwrap_or(target));
    let host = host.map_err(|_not_text| Refusal::request("the host is no text"))?;
    let path = request.uri.path_and_query().cloned();
    let path = path.unwrap_or_else(|| PathAndQuery::from_static("/"));
    request.uri = Uri::from(path);
    let wants_trailers = tokens(&request.headers, &TE).any(|token| token == "trailers");
    let has_body = has_body(request);
    let upgrade = asks_for_upgrade(request).filter(|_| !has_body);
    without_own(&mut request.headers);
    if has_body && !request.headers.contains_key(CONTENT_LENGTH) {
        // Said in full: some methods have no body unless they say so.
        let chunked = HeaderValue::from_static("chunked");
        request.headers.insert(TRANSFER_ENCODING, chunked);
    }
    request.headers.remove(PROXY_AUTHORIZATION);
    request.headers.insert(HOST, host);
    if let Some(protocol) = &upgrade {
        request
            .headers
            .insert(CONNECTION, HeaderValue::from_static("upgrade"));
        request.headers.insert(UPGRADE, protocol.clone());
    } else if wants_trailers {
        request
            .headers
            .insert(CONNECTION, HeaderValue::from_static("te"));
        request
            .headers
            .insert(TE, HeaderValue::from_static("trailers"));
    }
    request.headers.append(VIA, by(request.version, via));
    request.version = Version::HTTP_11;
    Ok(upgrade.is_some())
}

/// For the fuzz target and the test that replays its corpus: `data` is a request head.
///
/// # Panics
/// When a target would get a request that reads two ways, or what was meant for this proxy.
pub fn fuzz_entry(data: &[u8]) {
    let mut fields = [httparse::EMPTY_HEADER; 64];
    let mut read = httparse::Request::new(&mut fields);
    let (Ok(httparse::Status::Complete(_)), Some(method), Some(path)) =
        (read.parse(data), read.method, read.path)
    else {
        return;
    };
    let mut builder = request::Builder::new().method(method).uri(path);
    for field in read.headers.iter() {
        builder = builder.header(field.name, field.value);
    }
    let Ok(request) = builder.body(()) else {
        return;
    };
    let (mut parts, ()) = request.into_parts();
    let target = match asked(&parts) {
        Ok(Asked::Request(target)) => target,
        Ok(Asked::Tunnel(target)) => return assert!(is_plain(&target), "{target:?}"),
        Err(_refused) => return,
    };
    assert!(is_plain(&target), "{target:?}");
    if for_target(&mut parts, &target, &HeaderValue::from_static("fuzz")).is_err() {
        return;
    }
    let count = |name: &HeaderName| parts.headers.get_all(name).iter().count();
    assert_eq!(count(&HOST), 1, "{parts:?}");
    assert_eq!(count(&PROXY_AUTHORIZATION), 0, "{parts:?}");
    assert!(
        count(&CONTENT_LENGTH) + count(&TRANSFER_ENCODING) <= 1,
        "{parts:?}"
    );
    assert!(parts.uri.authority().is_none(), "{parts:?}");
    assert!(
        tokens(&parts.headers, &CONNECTION).all(|own| own == "upgrade" || own == "te"),
        "{parts:?}"
    );
}

/// Whether a target is `host:port`, and nothing else.
fn is_plain(target: &str) -> bool {
    let is_clean = target
        .bytes()
        .all(|octet| octet.is_ascii_graphic() && !b"@/?#".contains(&octet));
    is_clean && Target::parse(target).is_ok_and(|target| target.port > 0)
}

/// Turns the request of `target` into one for a proxy before it: with a whole URL, and what that proxy alone is told.
///
/// # Errors
/// The URL cannot be written.
pub(super) fn for_parent(
    request: &mut request::Parts,
    target: &str,
    parent: Parent,
) -> Result<(), Refusal> {
    let mut uri = std::mem::take(&mut request.uri).into_parts();
    uri.scheme = Some(Scheme::HTTP);
    uri.authority = target.strip_suffix(":80").unwrap_or(target).parse().ok();
    request.uri =
        Uri::from_parts(uri).map_err(|_bad| Refusal::request("the URL cannot be written"))?;
    if let Some(authorization) = parent.authorization {
        request.headers.insert(PROXY_AUTHORIZATION, authorization);
    }
    Ok(())
}

/// Turns the target's response into the client's. `upgrades`: the client asked for that.
pub(super) fn for_client(response: &mut response::Parts, via: &HeaderValue, upgrades: bool) {
    let protocol = response.headers.remove(UPGRADE).filter(|_| upgrades);
    without_own(&mut response.headers);
    // A target does not ask for what is due to a proxy.
    response.headers.remove(PROXY_AUTHENTICATE);
    if let Some(protocol) = protocol {
        response
            .headers
            .insert(CONNECTION, HeaderValue::from_static("upgrade"));
        response.headers.insert(UPGRADE, protocol);
    }
    response.headers.append(VIA, by(response.version, via));
    // Its framing is the client's connection's: a response without a length must not end like one that is cut off.
    response.version = Version::HTTP_11;
}

/// The protocol that the client asks for, if it may: HTTP/2 would take the connection out of this proxy's sight.
fn asks_for_upgrade(request: &request::Parts) -> Option<HeaderValue> {
    let is_named = tokens(&request.headers, &CONNECTION).any(|token| token == "upgrade");
    let mut values = request.headers.get_all(UPGRADE).iter();
    let (protocol, other) = (values.next()?, values.next());
    let text = protocol.to_str().ok()?.to_ascii_lowercase();
    let is_http = text
        .split(',')
        .map(str::trim)
        .any(|one| one.starts_with("h2c") || one.starts_with("http/"));
    (is_named && other.is_none() && !is_http && request.version == Version::HTTP_11)
        .then(|| protocol.clone())
}

/// RFC 9110, section 7.6.2: a request that may pass no further proxy is answered by the last.
fn max_forwards(request: &mut request::Parts) -> Result<(), Refusal> {
    if request.method != Method::OPTIONS {
        return Ok(());
    }
    let Some(value) = request.headers.get(MAX_FORWARDS) else {
        return Ok(());
    };
    let left = value
        .to_str()
        .ok()
        .and_then(|text| text.parse::<u32>().ok());
    match left.map(|left| left.checked_sub(1)) {
        None => Err(Refusal::request("Max-Forwards is not a number")),
        Some(None) => Err(Refusal::last_proxy()),
        Some(Some(left)) => {
            request
                .headers
                .insert(MAX_FORWARDS, HeaderValue::from(left));
            Ok(())
        }
    }
}

/// Removes headers that concern one connection, and those that `Connection` names.
fn without_own(headers: &mut HeaderMap) {
    let named: Vec<HeaderName> = tokens(headers, &CONNECTION)
        .filter_map(|token| token.parse().ok())
        .filter(|name| *name != CONTENT_LENGTH)
        .collect();
    for name in named.iter().chain(&OF_ONE_CONNECTION) {
        headers.remove(name);
    }
}

/// Removes trailers that would be read as headers of the connection, or meant for a proxy.
pub(super) fn clean_trailers(trailers: &mut HeaderMap) {
    let unfit = [
        PROXY_AUTHORIZATION,
        PROXY_AUTHENTICATE,
        HOST,
        CONTENT_LENGTH,
        VIA,
    ];
    for name in unfit.iter().chain(&OF_ONE_CONNECTION) {
        trailers.remove(name);
    }
}

/// The elements of a comma-separated header, in lower case.
fn tokens<'a>(headers: &'a HeaderMap, name: &HeaderName) -> impl Iterator<Item = String> + 'a {
    let values = headers.get_all(name).iter();
    let texts = values.filter_map(|value| value.to_str().ok());
    texts
        .flat_map(|text| text.split(','))
        .map(|token| token.trim().to_ascii_lowercase())
        .filter(|token| !token.is_empty())
}

/// A `Via` entry: the version in which the message came, and who received it.
fn by(version: Version, via: &HeaderValue) -> HeaderValue {
    let version: &[u8] = if version == Version::HTTP_10 {
        b"1.0 "
    } else {
        b"1.1 "
    };
    HeaderValue::from_bytes(&[version, via.as_bytes()].concat())
        .unwrap_or_else(|_never| via.clone())
}

fn contains(text: &[u8], part: &[u8]) -> bool {
    text.windows(part.len()).any(|window| window == part)
}
