//! Finds PEM blocks the way Go's `encoding/pem` does, because upstream's rules for CA bundles and key pairs are written in
//! terms of it: text around blocks is ignored, and a block that does not end or does not decode is skipped without spoiling
//! its neighbours. `rustls-pki-types` decodes the base64.

/// One block whose `BEGIN` and `END` lines agree. Its body is not decoded yet.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct PemBlock<'a> {
    /// Text after `BEGIN`, for example `CERTIFICATE`.
    pub(super) label: &'a str,
    /// The body starts with `Key: value` lines (RFC 1421 headers, as old encrypted keys have).
    pub(super) has_headers: bool,
    /// The whole block, both marker lines included.
    pub(super) text: &'a [u8],
}

/// All complete blocks of `bytes`, in order.
pub(super) fn blocks(bytes: &[u8]) -> Vec<PemBlock<'_>> {
    let mut found = Vec::new();
    let mut open: Option<Open<'_>> = None;
    let mut start = 0;
    for line in bytes.split_inclusive(|byte| *byte == b'\n') {
        let end = start + line.len();
        if let Some(label) = marker(line, "-----BEGIN ") {
            // A block that is still open was truncated: it is dropped for this one.
            open = Some(Open {
                label,
                start,
                first_body_line: None,
            });
        } else if line.starts_with(b"-----END ") {
            let ended = marker(line, "-----END ");
            if let Some(block) = open.take().filter(|block| ended == Some(block.label)) {
                found.push(PemBlock {
                    label: block.label,
                    has_headers: block
                        .first_body_line
                        .is_some_and(|line| line.contains(&b':')),
                    text: bytes.get(block.start..end).unwrap_or_default(),
                });
            }
        } else if let Some(block) = open.as_mut()
            && block.first_body_line.is_none()
            && !line.trim_ascii().is_empty()
        {
            block.first_body_line = Some(line);
        }
        start = end;
    }
    found
}

/// A block whose `END` line has not been seen.
struct Open<'a> {
    label: &'a str,
    start: usize,
    first_body_line: Option<&'a [u8]>,
}

/// The label of a marker line, or `None` when the line is no such marker.
fn marker<'a>(line: &'a [u8], prefix: &str) -> Option<&'a str> {
    let label = line
        .strip_prefix(prefix.as_bytes())?
        .trim_ascii_end()
        .strip_suffix(b"-----")?;
    std::str::from_utf8(label).ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn labels(text: &str) -> Vec<String> {
        blocks(text.as_bytes())
            .iter()
            .map(|block| block.label.to_owned())
            .collect()
    }

    #[test]
    fn blocks_are_found_between_comments_and_with_windows_line_ends() {
        let text = "hello\r\n-----BEGIN A-----\r\nAAAA\r\n-----END A-----\r\nmore\n-----BEGIN B C-----\nAAAA\n-----END B C-----";
        assert_eq!(labels(text), ["A", "B C"]);
    }

    #[test]
    fn truncated_block_does_not_swallow_the_next_one() {
        let text = "-----BEGIN A-----\nAAAA\n-----BEGIN B-----\nAAAA\n-----END B-----\n";
        assert_eq!(labels(text), ["B"]);
        assert_eq!(labels("-----BEGIN A-----\nAAAA\n"), [""; 0]);
    }

    #[test]
    fn block_with_another_end_label_is_dropped() {
        assert_eq!(
            labels("-----BEGIN A-----\nAAAA\n-----END B-----\n"),
            [""; 0]
        );
    }

    #[test]
    fn pem_headers_are_detected() {
        let text = b"-----BEGIN A-----\nProc-Type: 4,ENCRYPTED\n\nAAAA\n-----END A-----\n";
        assert!(blocks(text).iter().all(|block| block.has_headers));
        let text = b"-----BEGIN A-----\n\nAAAA\n-----END A-----\n";
        assert!(blocks(text).iter().all(|block| !block.has_headers));
    }
}
