//! A lane whose peer says what no peer by the rules does.

use tokio::io::AsyncWriteExt as _;
use tokio::net::TcpListener;

use super::*;

/// Of the tunnel, between two pieces of something else.
const DATA_BYTES: usize = 4096;
/// Of something else: nearly as much as one read brings.
const OTHER_BYTES: usize = 240 * 1024;
/// From here on so much was something else that nothing of it may be kept.
const SOON: usize = 4 * DATA_BYTES;

/// A frame of this number for the first tunnel.
fn frame(number: u8, payload: &[u8]) -> Vec<u8> {
    let length = u32::try_from(payload.len()).unwrap();
    let mut frame = vec![number, 0, 0, 1];
    frame.extend(length.to_be_bytes());
    frame.extend(payload);
    frame
}

/// Or each of some kilobytes that wait for a slow reader would keep a whole read, of which no budget knows.
///
/// Limit (memory): Read buffers kept alive by tunnel bytes of a lane | 512 KiB per lane
#[tokio::test]
async fn bytes_of_a_tunnel_keep_little_of_what_they_were_read_with() {
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
