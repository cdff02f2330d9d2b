//! Entry point of the fuzz target `tls_records`.

use super::{
    ContentReader, HANDSHAKE, HEADER_BYTES, MESSAGE_BYTES_MAX, MESSAGE_HEADER_BYTES, Meaning,
    RecordViolation, SEALED_BYTES_MAX, TAG_BYTES, content, sealed_bytes,
};

/// The first byte selects the role and where messages are cut. The rest is unencrypted records: a header, then as many
/// bytes as the header says, less the tag. The reader must not panic, a partial message must stay bounded, and record
/// boundaries must not change the meaning of handshake messages.
///
/// # Panics
/// When one of these properties is violated.
pub fn fuzz_entry(input: &[u8]) {
    let Some((&choice, stream)) = input.split_first() else {
        return;
    };
    let is_client = choice & 1 == 1;
    let mut records = Vec::new();
    let whole = play(is_client, stream, &mut records);
    let changes_keys = |meanings: &[Meaning]| {
        let mut keys = meanings.iter();
        keys.any(|meaning| matches!(meaning, Meaning::NewKeys { .. }))
    };
    // A KeyUpdate must end its record, and too many empty records are a violation; neither may be cut.
    let Ok(whole) = whole.as_deref().map(significant) else {
        return;
    };
    if changes_keys(&whole) || records.len() > 8 {
        return;
    }
    let mut reader = ContentReader::new(is_client);
    let mut cut = Vec::new();
    for (kind, content) in &records {
        let at = usize::from(choice >> 1) % (content.len() + 1);
        let parts = content.split_at_checked(at);
        let parts = match parts {
            Some((one, two)) if *kind == HANDSHAKE && !one.is_empty() && !two.is_empty() => {
                vec![one, two]
            }
            _ => vec![&content[..]],
        };
        for part in parts {
            match reader.read(*kind, part) {
                Ok(meaning) => cut.push(meaning),
                Err(violation) => panic!("refused when cut at {at}: {violation}"),
            }
        }
    }
    assert_eq!(significant(&cut), whole, "the cut changed what it means");
}

/// The meanings other than [`Meaning::Nothing`].
fn significant(meanings: &[Meaning]) -> Vec<Meaning> {
    let all = meanings.iter().copied();
    all.filter(|meaning| *meaning != Meaning::Nothing).collect()
}

/// The meanings up to the end of the stream; adds their records to `records`.
fn play<'a>(
    is_client: bool,
    mut stream: &'a [u8],
    records: &mut Vec<(u8, &'a [u8])>,
) -> Result<Vec<Meaning>, RecordViolation> {
    let mut reader = ContentReader::new(is_client);
    let mut meanings = Vec::new();
    while let Some((header, rest)) = stream.split_first_chunk::<HEADER_BYTES>() {
        let sealed = sealed_bytes(*header)?;
        assert!(sealed > TAG_BYTES && sealed <= SEALED_BYTES_MAX);
        let Some((opened, next)) = rest.split_at_checked(sealed - TAG_BYTES) else {
            break;
        };
        let (kind, length) = content(opened)?;
        let content = opened.get(..length).unwrap_or_default();
        records.push((kind, content));
        let meaning = reader.read(kind, content)?;
        assert!(
            reader.message.len() < MESSAGE_HEADER_BYTES + MESSAGE_BYTES_MAX,
            "a whole message is kept"
        );
        meanings.push(meaning);
        if meaning == Meaning::GoodBye {
            break;
        }
        stream = next;
    }
    Ok(meanings)
}
