// Streams an answer: go run . PROMPT [ADDRESS]
package main

import (
	"context"
	"fmt"
	"io"
	"log"
	"os"
	"os/signal"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/keepalive"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"

	pb "whippet-example/gen/whippet/v1"
)

// UNAVAILABLE is tried again: when the server says, or else backing off, and never once an answer has begun.
const serviceConfig = `{
  "loadBalancingConfig": [{"round_robin": {}}],
  "methodConfig": [{
    "name": [{"service": "whippet.v1.GenerationService"}],
    "retryPolicy": {
      "maxAttempts": 5, "initialBackoff": "0.2s", "maxBackoff": "5s", "backoffMultiplier": 2,
      "retryableStatusCodes": ["UNAVAILABLE"]
    }
  }]
}`

func main() {
	prompt, address := os.Args[1], "127.0.0.1:50051"
	if len(os.Args) > 2 {
		address = os.Args[2]
	}
	// Ctrl-C cancels the call, so that the server stops generating.
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt)
	defer stop()
	ctx, cancel := context.WithTimeout(ctx, time.Minute) // retries included
	defer cancel()
	if token := os.Getenv("WHIPPET_TOKEN"); token != "" {
		ctx = metadata.AppendToOutgoingContext(ctx, "authorization", "Bearer "+token)
	}

	// Dial and WithInsecure are what every grpc-go 1.x has; since 1.64 it prefers NewClient and insecure.NewCredentials.
	security := grpc.WithInsecure()
	if ca := os.Getenv("WHIPPET_CA"); ca != "" {
		trusted, err := credentials.NewClientTLSFromFile(ca, "")
		if err != nil {
			log.Fatal(err)
		}
		security = grpc.WithTransportCredentials(trusted)
	}
	alive := grpc.WithKeepaliveParams(keepalive.ClientParameters{Time: 30 * time.Second, Timeout: 10 * time.Second})
	channel, err := grpc.Dial(address, security, alive, grpc.WithDefaultServiceConfig(serviceConfig))
	if err != nil {
		log.Fatal(err)
	}
	defer channel.Close()

	request := &pb.GenerateStreamRequest{
		Input:    &pb.GenerateStreamRequest_Text{Text: prompt},
		Stopping: &pb.StoppingOptions{MaxTokens: proto.Int32(64)},
		Sampling: &pb.SamplingOptions{Temperature: proto.Float32(0)},
	}
	stream, err := pb.NewGenerationServiceClient(channel).GenerateStream(ctx, request)
	for err == nil {
		var message *pb.GenerateStreamResponse
		if message, err = stream.Recv(); err == nil {
			fmt.Print(message.GetText())
			if finish := message.GetFinish(); finish != nil {
				fmt.Fprintf(os.Stderr, "\n%d tokens\n", finish.GetUsage().GetCompletionTokens())
			}
		}
	}
	if err != io.EOF {
		log.Fatalf("%s: %s", status.Code(err), status.Convert(err).Message())
	}
}
