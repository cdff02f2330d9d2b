//! Tests of a lane whose peer sends frames that no compliant peer sends.

use tokio::io::AsyncWriteExt as _;
use tokio::net::TcpListener;

use super::*;

/// Tunnel bytes between two blocks of other frames.
const DATA_BYTES: usize = 4096;
/// Bytes of other frames: nearly as many as one read returns.
const OTHER_BYTES: usize = 240 * 1024;
/// Tunnel bytes after which DATA must no longer share a read buffer: by then nearly all bytes were other frames.
const SOON: usize = 4 * DATA_BYTES;

/// A frame of this type for the first tunnel.
fn frame(number: u8, payload: &[u8]) -> Vec<u8> {
    let length = u32::try_from(payload.len()).unwrap();
    let mut frame = vec![number, 0, 0, 1];
    frame.extend(length.to_be_bytes());
    frame.extend(payload);
    frame
}

/// Otherwise each of some KiB that wait for a slow reader would keep a whole read buffer, which no budget counts.
///
/// Limit (memory): Read buffers kept alive by tunnel bytes of a lane | 512 KiB per lane
#[tokio::test]
async fn tunnel_bytes_keep_little_of_their_read_buffers() {
    let listener = TcpListener::bind(("127.0.0.1", 0)).await.unwrap();
    let near = TcpStream::connect(listener.local_addr().unwrap());
    let (near, far) = tokio::join!(near, listener.accept());
    let mut far = far.unwrap().0;
    let frames = FrameReader::default();
    let mut lane = Lane::in_clear(near.unwrap(), LaneRole::Agent, frames, Bytes::new());
    far.write_all(&frame(1, b"\0\x03tcpa:1")).await.unwrap();
    let asked = lane.event().await;
    assert!(matches!(asked, Ok(LaneEvent::Open(_))), "{asked:?}");
    lane.end().accept();

    let unknown = frame(200, &[0; 16 * 1024 - 8]);
    let other = unknown.repeat(OTHER_BYTES / unknown.len());
    let round = [other, frame(4, &[7; DATA_BYTES]), frame(200, b"")].concat();
    let rounds = 16;
    let sending = async {
        for _round in 0..rounds {
            far.write_all(&round).await.unwrap();
        }
    };
    let receiving = async {
        let mut received = 0;
        while received < rounds * DATA_BYTES {
            let Ok(LaneEvent::Data(bytes)) = lane.event().await else {
                panic!("nothing but data comes");
            };
            assert!(bytes.iter().all(|byte| *byte == 7));
            assert!(received < SOON || bytes.is_unique(), "after {received}");
            received += bytes.len();
        }
    };
    tokio::join!(sending, receiving);
}
