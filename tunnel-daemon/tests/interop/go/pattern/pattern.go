// Package pattern makes and checks a byte stream whose every byte is known from its offset,
// so that a lost, doubled or foreign piece is found at the byte where it happens.
package pattern

import (
	"bytes"
	"fmt"
	"hash/crc32"
)

// period is a prime, so a piece moved by any power of two does not look right by chance.
const period = 65521

// block holds the pattern twice, so that any window of up to one period is one slice of it.
var block = func() [2 * period]byte {
	var out [2 * period]byte
	state := uint32(2463534242)
	for i := range period {
		state ^= state << 13
		state ^= state >> 17
		state ^= state << 5
		out[i] = byte(state)
		out[i+period] = byte(state)
	}
	return out
}()

var castagnoli = crc32.MakeTable(crc32.Castagnoli)

// At returns up to n bytes (at most one period) of the stream beginning at offset. The slice is shared: read only.
func At(offset int64, n int) []byte {
	start := int(offset % period)
	return block[start : start+min(n, period)]
}

// Checker is a writer that compares what it is given with the stream.
type Checker struct {
	bytes    int64
	crc      uint32
	wrongAt  int64
	anyWrong bool
}

// Write checks the next piece. It never fails: read the verdict from Intact.
func (c *Checker) Write(p []byte) (int, error) {
	total := len(p)
	for len(p) > 0 {
		want := At(c.bytes, len(p))
		got := p[:len(want)]
		if !c.anyWrong && !bytes.Equal(got, want) {
			c.anyWrong = true
			c.wrongAt = c.bytes
		}
		c.crc = crc32.Update(c.crc, castagnoli, got)
		c.bytes += int64(len(got))
		p = p[len(got):]
	}
	return total, nil
}

// Bytes says how many bytes were checked.
func (c *Checker) Bytes() int64 { return c.bytes }

// Intact says whether all bytes so far were the right ones.
func (c *Checker) Intact() bool { return !c.anyWrong }

// Sum is the CRC-32C of everything so far, in hex.
func (c *Checker) Sum() string { return fmt.Sprintf("%08x", c.crc) }
