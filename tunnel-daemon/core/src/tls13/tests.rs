//! Tests of post-handshake messages, split over records in every way, and of each message that a peer may not send.

use super::*;

const CLIENT: bool = true;
const SERVER: bool = false;

fn message(kind: u8, body: &[u8]) -> Vec<u8> {
    let length = u32::try_from(body.len()).unwrap().to_be_bytes();
    [&[kind], &length[1..], body].concat()
}

/// A NEW_SESSION_TICKET message whose ticket has `bytes` bytes.
fn ticket(bytes: usize) -> Vec<u8> {
    let mut body = vec![0, 0, 1, 0, 9, 9, 9, 9, 2, 7, 7];
    body.extend(u16::try_from(bytes).unwrap().to_be_bytes());
    body.extend(std::iter::repeat_n(5, bytes));
    // The early_data extension.
    body.extend([0, 8, 0, 42, 0, 4, 0, 0, 1, 0]);
    message(NEW_SESSION_TICKET, &body)
}

fn key_update(asks: u8) -> Vec<u8> {
    message(KEY_UPDATE, &[asks])
}

fn read_all(is_client: bool, records: &[(u8, &[u8])]) -> Result<Vec<Meaning>, RecordViolation> {
    let mut reader = ContentReader::new(is_client);
    records
        .iter()
        .map(|(kind, content)| reader.read(*kind, content))
        .collect()
}

#[test]
fn every_message_of_a_record_counts() {
    let new_keys = |asks| Meaning::NewKeys { asks };
    let many = [ticket(10), ticket(1), key_update(0)].concat();
    for (record, expected) in [
        (ticket(10), Meaning::Nothing),
        ([ticket(10), ticket(300)].concat(), Meaning::Nothing),
        (key_update(0), new_keys(false)),
        ([ticket(10), key_update(1)].concat(), new_keys(true)),
        (many, new_keys(false)),
    ] {
        let read = read_all(CLIENT, &[(HANDSHAKE, &record)]);
        assert_eq!(read, Ok(vec![expected]));
    }
}

#[test]
fn a_message_may_lie_in_several_records() {
    let all = [ticket(40), ticket(7), key_update(1)].concat();
    for first in 1..all.len() {
        for second in [first + 1, (first + all.len()).div_ceil(2), all.len()] {
            let (one, rest) = all.split_at(first);
            let (two, three) = rest.split_at(second.min(all.len()) - first);
            let records: Vec<(u8, &[u8])> = [one, two, three]
                .into_iter()
                .filter(|part| !part.is_empty())
                .map(|part| (HANDSHAKE, part))
                .collect();
            let mut meanings = read_all(CLIENT, &records).unwrap();
            assert_eq!(meanings.pop(), Some(Meaning::NewKeys { asks: true }));
            let rest = meanings.iter().all(|one| *one == Meaning::Nothing);
            assert!(rest, "{first} {second}: {meanings:?}");
        }
    }
}

/// Limit (sizes): TLS message split over several records, on a lane | 64 KiB at the client; 4 bytes at the server,
/// which gets no tickets
#[test]
fn forbidden_records_and_messages_are_refused() {
    use RecordViolation as Wrong;
    let half = &ticket(40)[..20];
    let mut without_a_ticket = ticket(1);
    without_a_ticket.drain(15..18);
    without_a_ticket.splice(15..15, [0, 0]);
    without_a_ticket[3] -= 1;
    let refused = |is_client, expected, records: &[(u8, &[u8])]| {
        let read = read_all(is_client, records);
        assert_eq!(read, Err(expected), "{records:?}");
    };
    let at_client = |expected, content: &[u8]| refused(CLIENT, expected, &[(HANDSHAKE, content)]);
    let at_server = |expected, content: &[u8]| refused(SERVER, expected, &[(HANDSHAKE, content)]);
    // A ticket for a server.
    at_server(Wrong::UnexpectedMessage, &ticket(1));
    // A message of the handshake.
    at_client(Wrong::UnexpectedMessage, &message(13, &[0, 0, 0]));
    // Payload within a message, and an end within a message.
    for other in [(APPLICATION_DATA, &[1][..]), (ALERT, &[1, 0])] {
        refused(CLIENT, Wrong::Interrupted, &[(HANDSHAKE, half), other]);
    }
    // A ticket with the old keys, and a part of a message with the old keys.
    let ticket_behind = [key_update(0), ticket(1)].concat();
    at_client(Wrong::BehindKeyUpdate, &ticket_behind);
    at_server(
        Wrong::BehindKeyUpdate,
        &[&key_update(0)[..], &[24]].concat(),
    );
    // Another wish, and a long wish, before it is there.
    at_server(Wrong::BadMessage, &key_update(2));
    at_server(Wrong::BadMessage, &[KEY_UPDATE, 0, 1, 0]);
    // A ticket beyond all bounds, before it is there.
    at_client(Wrong::BadMessage, &[NEW_SESSION_TICKET, 1, 0, 0]);
    // A ticket without fields, a ticket that is empty, and no message at all.
    at_client(Wrong::BadMessage, &message(NEW_SESSION_TICKET, &[0; 9]));
    at_client(Wrong::BadMessage, &without_a_ticket);
    at_client(Wrong::BadMessage, &[]);
    // An alert, and half of an alert.
    refused(CLIENT, Wrong::Alert, &[(ALERT, &[2, 40])]);
    refused(CLIENT, Wrong::Alert, &[(ALERT, &[1])]);
    // Another type.
    refused(CLIENT, Wrong::UnexpectedRecord, &[(20, &[1])]);
}

#[test]
fn close_notify_has_any_level_and_may_follow_user_canceled() {
    for level in [1, 2] {
        let records: [(u8, &[u8]); 2] = [(ALERT, &[1, 90]), (ALERT, &[level, 0])];
        let expected = vec![Meaning::Nothing, Meaning::GoodBye];
        assert_eq!(read_all(CLIENT, &records), Ok(expected));
    }
}

#[test]
fn payload_resets_the_count_of_empty_records() {
    let empty = |count: u32| (0..count).map(|_| (APPLICATION_DATA, &[][..]));
    let most = EMPTY_RECORDS_MAX;
    let payload = (APPLICATION_DATA, &[1][..]);
    let fine: Vec<(u8, &[u8])> = empty(most).chain([payload]).chain(empty(most)).collect();
    assert!(read_all(SERVER, &fine).is_ok());
    let many: Vec<(u8, &[u8])> = empty(most + 1).collect();
    assert_eq!(read_all(SERVER, &many), Err(RecordViolation::TooManyEmpty));
}

#[test]
fn lengths_have_bounds_and_padding_is_no_content() {
    let header = |length: usize| {
        let [high, low] = u16::try_from(length).unwrap().to_be_bytes();
        sealed_bytes([APPLICATION_DATA, 3, 3, high, low])
    };
    assert_eq!(header(TAG_BYTES), Err(RecordViolation::TooShort));
    assert_eq!(header(TAG_BYTES + 1), Ok(TAG_BYTES + 1));
    assert_eq!(header(SEALED_BYTES_MAX), Ok(SEALED_BYTES_MAX));
    assert_eq!(header(SEALED_BYTES_MAX + 1), Err(RecordViolation::TooLong));
    let other = [ALERT, 3, 3, 0, 20];
    assert_eq!(sealed_bytes(other), Err(RecordViolation::NoRecord));
    let other = [APPLICATION_DATA, 2, 3, 0, 20];
    assert_eq!(sealed_bytes(other), Err(RecordViolation::NoRecord));
    assert_eq!(content(&[1, 2, 0, 22, 0, 0]), Ok((22, 3)));
    assert_eq!(content(&[23]), Ok((23, 0)));
    assert_eq!(content(&[0, 0]), Err(RecordViolation::NoType));
    let mut full = vec![1; PLAIN_BYTES_MAX + 1];
    assert_eq!(content(&full), Ok((1, PLAIN_BYTES_MAX)));
    full.push(0);
    assert_eq!(content(&full), Err(RecordViolation::TooLong));
}
